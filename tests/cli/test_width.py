"""Widths, colours and pipes: a kernel's name stays whole, and output without a terminal is plain."""

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from tunedgemm.cli import main
from tunedgemm.device import Device
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.text.console import Column, Console, grid_of, print_grid
from tunedgemm.timing import Timing
from tunedgemm.tuner.report import summary
from tunedgemm.tuner.trial import Outcome, Place, Report, Task

#: Longer than any terminal of the tests.
KERNEL = "_ZN5aiter40bf16gemm_fp32bf16_tn_96x64_splitk_cleanE" + "x" * 100
HEAD = "gfx,cu_num,M,N,K,bias,dtype,outdtype,libtype,solidx,splitK,us,kernelName,err_ratio"
WIDTHS = ("20", "60", "100", "")


@pytest.fixture
def files(tmp_path):
    """Write two tables with a long name, and a list of the shapes."""
    for name, libtype in (("a", "asm"), ("b", "triton")):
        lines = [f"gfx942,304,{m},1280,8192,False,bf16,bf16,{libtype},3,4,{m}.5,{KERNEL},0.0" for m in (16, 32)]
        (tmp_path / f"{name}.csv").write_text("\n".join([HEAD, *lines, ""]))
    (tmp_path / "u.csv").write_text("M,N,K,bias,dtype,outdtype\n16,1280,8192,False,bf16,bf16\n48,1280,8192,False,bf16,bf16\n")
    return {name: str(tmp_path / f"{name}.csv") for name in "abu"}


@pytest.fixture(params=WIDTHS)
def columns(request, monkeypatch):
    """Set COLUMNS, or leave it unset."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if request.param:
        monkeypatch.setenv("COLUMNS", request.param)


COMMANDS = [
    "table show {a}", "table diff {a} {b}", "explain {a}:2", "explain 16,1280,8192 --table {a} --device gfx942:304",
    "coverage {u} --device gfx942:304 --table {a} --by shape -v --next 3", "plugins -v", "plugins --matrix",
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_keeps_names_whole(command, files, columns, fake_plugins, capsys):
    """Kernel names and libtypes stand on one line at any width; output without COLUMNS is whole, too."""
    main([word.format(**files) for word in command.split()])
    out = capsys.readouterr().out
    names = ["fake_unimportable"] if command.startswith("plugins") else ["N=1280 K=8192"]
    names += [KERNEL] if command.split()[0] in ("table", "explain") else []
    for name in names:
        assert any(name in line for line in out.splitlines()), out


def test_the_report_of_a_run_keeps_names_whole():
    """Its table has fewer columns, then is printed as records; a narrow one is left out."""
    task, winner = Task(Shape("a16w16", 1, 64, 64)), Solution("triton", KERNEL)
    timing = Timing(task.shape, winner, "ok", us=5.0)
    place = Place(Device("sm_90", 132, "nvidia-h200", 0))
    for width in (80, 120, 200, 300):
        output = Console(file=io.StringIO(), width=width)
        summary(Report((place,), Path("t.csv"), (Outcome(task, timing, None, (timing,)),)), output=output)
        assert any(str(winner) in line for line in output.file.getvalue().splitlines())


class TestGrid:
    """The forms of a table."""

    COLUMNS = ("name", Column("us", right=True, optional=True), Column("why", prose=True))
    ROWS = ({"name": "n" * 30, "us": "1.0", "why": "one two three four five six seven eight"}, {"name": "m", "why": "w" * 25})

    def shown(self, width, **options):
        output = Console(file=io.StringIO(), width=width, **options)
        print_grid(grid_of(self.COLUMNS, self.ROWS, "title"), output)
        return output.file.getvalue().splitlines()

    @pytest.mark.parametrize("width", [*range(10, 110, 3)])
    def test_no_word_is_broken_and_no_table_is_too_wide(self, width):
        """Prose wraps at spaces; records may be longer than the terminal, which wraps them."""
        lines = self.shown(width)
        text = " ".join(" ".join(lines).replace("│", " ").split())
        words = [word for row in self.ROWS for name in ("name", "why") for word in row[name].split()]
        assert all(any(word in line for line in lines) for word in words)
        assert lines[0] == "title" and text.count("n" * 30) == 1
        if "┃" in lines[2] or "─" in lines[2]:
            assert max(map(len, lines)) <= width

    def test_narrower_forms_follow(self):
        """All columns, then those that are not optional, then no lines, then records with every cell."""
        assert len(self.shown(90)[2].split("┃")) == 5
        assert len(self.shown(68)[2].split("┃")) == 5 and len(self.shown(68)) > len(self.shown(90))
        assert len(self.shown(62)[2].split("┃")) == 4
        assert self.shown(59)[1].split() == ["name", "why"] and max(map(len, self.shown(59))) == 59
        assert self.shown(40)[1:5] == [f"name  {'n' * 30}", "us    1.0", f"why   {self.ROWS[0]['why']}", ""]

    def test_output_without_a_terminal_has_one_line_a_row(self):
        """The table is as wide as its cells."""
        lines = self.shown(20, grows=True)
        assert len(lines) == 1 + 3 + 2 + 1 and len(set(map(len, lines[1:]))) == 1

    def test_escapes_count_as_they_are_shown(self):
        """Hostile names keep the borders in line, and a newline begins no row."""
        rows = [{"name": "a\x1b[2J\nb"}, {"name": "c"}]
        output = Console(file=io.StringIO(), width=80)
        print_grid(grid_of(("name",), rows), output)
        lines = output.file.getvalue().splitlines()
        assert r"a\x1b[2J\nb" in lines[3] and len(set(map(len, lines))) == 1 and len(lines) == 6


@pytest.mark.parametrize("columns", ["0", "abc", "-5", "9" * 9])
def test_an_impossible_width_is_not_obeyed(columns, files, monkeypatch, capsys):
    """The output is that without COLUMNS."""
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["table", "show", files["a"]]) == 0
    out = capsys.readouterr().out
    assert "┃" in out and KERNEL in out


def test_shapes_of_a_model_have_one_line_each_in_a_pipe(experts, monkeypatch, capsys):
    """Several layers' names stand on one line, whatever their length."""
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["shapes", "--model_dir", experts]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert rows and all(line.split("│")[1].strip() for line in rows)


def run(command, environment=None, **options):
    path = os.pathsep.join(filter(None, sys.path))
    merged = {**os.environ, "PYTHONPATH": path, "TERM": "xterm-256color", **(environment or {})}
    return subprocess.run([sys.executable, "-m", "tunedgemm", *command], env=merged, timeout=60, check=False, **options)


@pytest.mark.parametrize(("variable", "escapes"), [({}, True), ({"NO_COLOR": ""}, True), ({"NO_COLOR": "1"}, False)])
def test_no_color_on_a_terminal(files, variable, escapes):
    """A terminal gets bold headings, and with a non-empty NO_COLOR not one escape."""
    parent, child = pty.openpty()
    environment = {"NO_COLOR": "", **variable}
    assert run(["table", "show", files["a"]], environment, stdout=child, stdin=subprocess.DEVNULL).returncode == 0
    os.close(child)
    text = b""
    try:
        while part := os.read(parent, 65536):
            text += part
    except OSError:  # the end of a terminal
        pass
    os.close(parent)
    assert KERNEL.encode() in text and (b"\x1b" in text) is escapes
