"""Paths that cannot be files: one line on standard error, exit code 2, no traceback."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tunedgemm.cli import main
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, write_rows
from tunedgemm.table.untuned import Untuned, write_untuned

LONG, DIGITS = "x" * 300, "9" * 5000
OP, SHAPE = op_named("a16w16"), Shape("a16w16", 4, 32, 64)

COMMANDS = {
    "coverage of an empty name": ["coverage", "list.csv", "--table", ""],
    "coverage of a long name": ["coverage", LONG],
    "coverage into a loop": ["coverage", "list.csv", "--device", "gfx942:304", "--csv", "loop.csv"],
    "coverage next to a loop": ["coverage", "list.csv", "--device", "gfx942:304", "-o", "loop.csv"],
    "explain a long name": ["explain", f"{LONG}:2"],
    "explain a line of thousands of digits": ["explain", f"table.csv:{DIGITS}"],
    "explain above a long name": ["explain", "1,2,3", "--table", LONG],
    "explain above an empty name": ["explain", "1,2,3", "--table", " "],
    "merge a loop": ["table", "merge", "loop.csv", "table.csv"],
    "merge two links to each other": ["table", "merge", "a.csv", "table.csv"],
    "merge a long name": ["table", "merge", LONG, "table.csv"],
    "show a long name": ["table", "show", LONG],
    "check a long name": ["table", "check", LONG],
    "check a loop": ["table", "check", "loop.csv"],
    "export a loop": ["table", "export", "--aiter", "loop.csv", "table.csv"],
    "diff a long name": ["table", "diff", "table.csv", LONG],
    "report a long name": ["report", LONG],
    "report a loop": ["report", "loop.csv"],
    "report into a loop": ["report", "table.csv", "-o", "loop.csv"],
    "report into a folder": ["report", "table.csv", "-o", "/"],
    "report against an empty name": ["report", "table.csv", "--against", " "],
    "tune a long name": ["tune", "-i", LONG],
}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_wrong_paths(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each ends in one line that names the fault, and no file is changed."""
    monkeypatch.chdir(tmp_path)
    write_rows(Path("table.csv"), OP, [Row(SHAPE, "gfx942", 304, "mi300x", Solution("torch", "native"), 5.0)])
    write_untuned(Path("list.csv"), OP, [Untuned(SHAPE)])
    for link, target in (("loop.csv", "loop.csv"), ("a.csv", "b.csv"), ("b.csv", "a.csv")):
        Path(link).symlink_to(target)
    before = {path.name: path.read_bytes() for path in (Path("table.csv"), Path("list.csv"))}

    assert main(words) == 2

    error = capsys.readouterr().err
    assert error.startswith("tunedgemm: error: ") and error.count("\n") == 1, error
    assert {name: Path(name).read_bytes() for name in before} == before


#: A path in each place of a command; @ stands for it.
PLACES = (
    "table show @", "table check @", "table merge @ table.csv", "table merge out.csv @", "table diff @ table.csv", "table diff table.csv @",
    "table export --aiter @ table.csv", "table export --aiter out.csv @", "table publish @ table.csv", "report @", "report table.csv -o @",
    "report table.csv --against @", "coverage @", "coverage list.csv --device gfx942:304 --csv @", "compare @ table.csv",
    "explain 1,2,3 --table @", "explain @:2",
)  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_no_path_ends_in_a_traceback(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Folders, devices, pipes, binary files and paths through files end in one line and exit code 2."""
    monkeypatch.chdir(tmp_path)
    write_rows(Path("table.csv"), OP, [Row(SHAPE, "gfx942", 304, "mi300x", Solution("torch", "native"), 5.0)])
    write_untuned(Path("list.csv"), OP, [Untuned(SHAPE)])
    Path("binary.csv").write_bytes(b"\x00\x01\xff\xfe")
    Path("folder.csv").mkdir()
    os.mkfifo("pipe.csv")
    for path in ("/", ".", "..", "folder.csv", "binary.csv", "pipe.csv", "/dev/full", "/dev/zero", "/proc/x.csv", "table.csv/x.csv"):
        assert main([path if word == "@" else word.replace("@", path) for word in place.split()]) == 2, path
        assert "tunedgemm: error: " in capsys.readouterr().err, path


@pytest.mark.parametrize("text", [".", "/", "loop.csv", LONG, "table.csv/x", " "])
def test_wrong_paths_in_a_variable(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A table that cannot be read is logged, and the others serve."""
    monkeypatch.chdir(tmp_path)
    write_untuned(Path("list.csv"), OP, [Untuned(SHAPE)])
    Path("loop.csv").symlink_to("loop.csv")
    monkeypatch.setenv(OP.columns.variable, text)

    assert main(["coverage", "list.csv", "--device", "gfx942:304"]) == 0
    assert "1 shape in list.csv" in capsys.readouterr().out
    assert not text.strip() or "a table that is not used" in caplog.text
