"""``tunedgemm ab``: two arms in turns, their verdict, and what bad input becomes."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from tunedgemm.analysis.ab import Result
from tunedgemm.analysis.ab.kernels import Kernels, ShapeResult
from tunedgemm.analysis.compare.verdict import Served
from tunedgemm.cli import main
from tunedgemm.cli.ab_output import Output
from tunedgemm.device import current_device
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, write_rows

#: Prints a time that differs by 0.1 % from run to run, and what SLOW adds.
ARM = """
import os, pathlib, time
count = pathlib.Path("runs"); runs = int(count.read_text()) if count.exists() else 0
count.write_text(str(runs + 1))
if str(runs) == os.environ.get("STOPS"):
    os.kill(os.getppid(), int(os.environ["SIGNAL"]))
    time.sleep(60)
number = 100 + 0.1 * (runs * 7 % 5) + float(os.environ.get("SLOW", 0)) + 5 * (os.environ.get("TUNEDGEMM_VLLM") == "1")
print(number if runs < int(os.environ.get("LAST", 999)) else "no more")
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Write the arm, in an empty folder, and return its words."""
    (tmp_path / "arm.py").write_text(ARM)
    monkeypatch.chdir(tmp_path)
    return ["--", sys.executable, "-SE", "arm.py"]


def test_a_slow_arm_ends_with_1(command, capsys):
    """B with 1 ms more of 100 is slower by 1 %; the file and --json are one document."""
    assert main(["ab", "--b", "SLOW=1", "--threshold", "0.8%", "--turns", "8", "-o", "r.json", "--json", *command]) == 1

    document = json.loads(capsys.readouterr().out)
    assert document == json.loads(Path("r.json").read_text())
    assert (document["schema"], document["version"]) == ("tunedgemm.ab", 1)
    assert document["command"] == command[1:] and document["arms"] == {"a": {}, "b": {"SLOW": "1"}}
    assert len(document["turns"]) == 8 and document["verdict"] == "slower" and document["slower"]
    assert document["effect"]["share"] == pytest.approx(0.01, abs=0.002) and not document["control"]["resolved"]


def test_the_threshold_and_the_direction_decide(command, capsys):
    """Less than the threshold ends with 0; so does a rate that rises."""
    assert main(["ab", "--b", "SLOW=1", "--threshold", "3", "--turns", "8", *command]) == 0
    assert "b is slower than a by " in capsys.readouterr().out
    assert main(["ab", "--b", "SLOW=9", "--more-is-better", "--turns", "8", *command]) == 0
    assert "b is faster than a" in capsys.readouterr().out


def test_the_arms_are_the_plugin_off_and_on(command, capsys):
    """Without --a and --b the engines' switches are 0 and 1."""
    assert main(["ab", "--turns", "8", "--threshold", "4%", *command]) == 1
    assert "b is slower than a by " in capsys.readouterr().out


def test_noise_is_not_resolved(command, capsys):
    """Arms that differ by a variable of no effect end with 0, and say what is excluded."""
    assert main(["ab", "--b", "OTHER=1", "--turns", "8", *command]) == 0
    assert "not resolved: b over a" in (out := capsys.readouterr().out) and "a slow-down of 1.00% is excluded" in out


def test_what_was_measured_before_a_failure_is_kept(command, capsys, monkeypatch):
    """The file has the turns, and why they ended; the exit code is 2."""
    monkeypatch.setenv("LAST", "29")

    assert main(["ab", "--b", "SLOW=1", "--turns", "9", "-o", "r.json", *command]) == 2

    out = capsys.readouterr()
    document = json.loads(Path("r.json").read_text())
    assert len(document["turns"]) == 8 and "no single number" in document["ended"] and document["verdict"] == "slower"
    assert "| no more" in out.err and "ended early, after 8 turns" in out.out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_keeps_the_turns(command, capsys, monkeypatch, number):
    """Ctrl-C and SIGTERM end the arm and the command, and the turns before stay."""
    monkeypatch.setenv("STOPS", "7")
    monkeypatch.setenv("SIGNAL", str(int(number)))

    assert main(["ab", "--b", "SLOW=1", "-o", "r.json", *command]) == 128 + number

    document = json.loads(Path("r.json").read_text())
    assert len(document["turns"]) == 1 and document["ended"] == "interrupted" and document["verdict"] == "not resolved"
    assert "ended early, after 1 turn: interrupted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--threshold", "yes", "--", "true"], "expected per cent in 0 to 100, such as 1% (got 'yes')"),
        (["--turns", "7", "--", "true"], "--turns: must be at least 8"),
        (["--turns", "-3", "--", "true"], "--turns"),
        (["--turns", "2.5", "--", "true"], "expected a whole number above 0"),
        (["--timeout", "0", "--", "true"], "expected seconds above 0"),
        (["--timeout", "0.2", "--", "sleep", "9"], "hung (got no end within 0.2 s); --timeout allows more"),
        (["--", "false"], "failed (got exit code 1)"),
        (["--", "true"], "got none"),
        (["--", "echo", "1", "2"], "got 2: 1, 2"),
        (["--number", "(x", "--", "echo", "1"], "not a regular expression"),
        (["--number", "x", "--", "echo", "1"], "needs one group"),
        (["--a", "X=1", "--b", "X=1", "--", "echo", "1"], "the arms are equal"),
        (["--b", f"HOME={os.environ.get('HOME', '')}", "--", "echo", "1"], "the arms are equal"),
        (["--a", "none.csv", "--", "echo", "1"], "none.csv: no such table"),
        (["-i", "u.csv", "--", "echo", "1"], "-i: lists kernels' shapes"),
        (["-o", "other.json", "--", "echo", "1"], "is not of `tunedgemm ab`"),
        (["-o", "absent/r.json", "--", "echo", "1"], "its folder does not exist"),
        (["--a", "X=1"], "NAME=VALUE is for a command"),
        (["--more-is-better", "-i", "u.csv"], "--more-is-better: is for a command"),
        ([], "needs a command after --, tables (--a, --b), or a list of shapes (-i)"),
    ],
)
def test_bad_input_is_named(command, capsys, flags, what):
    """A mistake ends with 2 and one line."""
    Path("other.json").write_text("{}")

    assert main(["ab", *flags]) == 2

    err = capsys.readouterr().err
    assert what in err and err.startswith(("tunedgemm: error: ", "  | ", "\n")) and err.count("tunedgemm: error") == 1


@pytest.fixture
def table(command, one_thread):
    """Write a table of torch's two calls of a shape."""

    def write(name: str, kernel: str, m: int = 2) -> str:
        here = current_device()
        fields = {"gfx": here.gfx, "cu_num": here.cu_num, "device": here.name}
        row = Row(shape=Shape("a16w16", m, 64, 128, "fp32"), solution=Solution("torch", kernel), us=9.0, **fields)
        write_rows(Path(name), op_named("a16w16"), [row])
        return name

    return write


def test_tables_of_equal_rows_are_refused(table, capsys):
    """Two files with the same solutions are equal arms."""
    assert main(["ab", "--a", table("a.csv", "native"), "--b", table("b.csv", "native")]) == 2
    assert "the arms are equal" in capsys.readouterr().err


def test_tables_of_a_command_are_its_variables(table, command, capsys):
    """Each arm gets the op's variable with the whole path of its table."""
    words = ["--", sys.executable, "-SEc", "import os; print(1 + os.environ['AITER_CONFIG_GEMM_BF16'].endswith('/b.csv'))"]

    assert main(["ab", "--a", table("a.csv", "native"), "--b", table("b.csv", "onednn"), "--turns", "8", *words]) == 1
    assert "b is slower than a by 100" in capsys.readouterr().out


def test_kernels_of_tables_are_timed(table, capsys):
    """Each shape has a line with both solutions, and the document has its rounds."""
    words = ["ab", "--a", table("a.csv", "native"), "--b", table("b.csv", "onednn"), "--turns", "8", "-o", "r.json"]

    assert main(words) in (0, 1)

    out = capsys.readouterr().out
    assert "(torch:native), b" in out and "A/A control" in out
    document = json.loads(Path("r.json").read_text())
    assert document["arms"] == {"a": "a.csv", "b": "b.csv"} and len(document["shapes"][0]["turns"]) == 8
    assert document["shapes"][0]["b"]["kernel_name"] == "onednn" and document["op"] == "a16w16"


def test_a_shape_whose_control_differs_is_not_resolved(capsys):
    """Its line says so, as the verdict does, where A differs from itself by as much as B."""
    arm = Served(Shape("a16w16", 1, 64, 128), Solution("torch", "native"))
    turns = tuple({"a": 100.0, "b": 104.0 + 0.1 * (turn % 2), "again": 104.1} for turn in range(8))

    Output(None, False, 0.01, 8).keep_shape(Kernels(current_device(), (ShapeResult(1, arm, arm, Result(turns)),)))

    assert ": b over a not resolved (+4.05% [" in capsys.readouterr().out


@pytest.mark.parametrize(("ended", "code"), [("interrupted", 130), ("SIGTERM", 143)])
def test_interrupted_kernels_end_with_the_signal(table, monkeypatch, ended, code):
    """The exit code is the same as a command's."""
    monkeypatch.setattr("tunedgemm.analysis.ab.compare_kernels", lambda *_: Kernels(current_device(), (), ended))

    assert main(["ab", "--a", table("a.csv", "native")]) == code
