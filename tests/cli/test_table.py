"""``tunedgemm table``: merging the tables of shards and machines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
from tunedgemm.cli import main
from tunedgemm.csvfile import Row, read_rows, write_rows
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution

OP = op_named("a16w16")
HEAD = "gfx,cu_num,M,N,K,libtype,us,kernelName,note"


def row(m: int, kernel: str = "k", us: float = 5.0, **more: object) -> Row:
    fields = {"gfx": "sm_90", "cu_num": 132, "device": "nvidia-h200", **more}
    return Row(shape=Shape("a16w16", m, 64, 128), solution=Solution("triton", kernel), us=us, **fields)


def rows(path: Path) -> set[tuple[int, str, str, float]]:
    return {(found.shape.m, found.device, found.solution.kernel_name, found.us) for found in read_rows(path, OP)[0]}


@pytest.fixture
def tables(tmp_path: Path):
    """Write tables of rows, one a list."""

    def write(*lists: list[Row]) -> list[str]:
        paths = [tmp_path / f"{number}.csv" for number in range(len(lists))]
        for path, found in zip(paths, lists, strict=True):
            write_rows(path, OP, found)
        return list(map(str, paths))

    return write


def test_shards_become_one_table(tables, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All rows of all tables are in OUT, which need not exist; other devices and libvers stay apart; the inputs are as they were."""
    paths = tables([row(1), row(3)], [row(2, libver="9.1"), row(1, device="nvidia-h100")], [row(0, "pin")])
    before = [Path(path).read_text() for path in paths]
    out = tmp_path / "new" / "out.csv"

    assert main(["table", "merge", str(out), *paths]) == 0

    assert rows(out) == {
        (1, "nvidia-h200", "k", 5.0), (3, "nvidia-h200", "k", 5.0), (2, "nvidia-h200", "k", 5.0),
        (1, "nvidia-h100", "k", 5.0), (0, "nvidia-h200", "pin", 5.0),
    }  # fmt: skip
    assert [found.libver for found in read_rows(out, OP)[0] if found.shape.m == 2] == ["9.1"]
    assert [Path(path).read_text() for path in paths] == before
    assert f"{out}: 5 rows, 0 conflicts, 0 lines left out" in capsys.readouterr().out


def test_the_lowest_time_decides_and_is_told(tables, capsys: pytest.CaptureFixture[str]) -> None:
    """Another solution for the same device and shape is a conflict, also with what OUT has; the same one faster is none."""
    out, *others = tables(
        [row(1, "old", 5.0), row(2, "old", 3.0), row(4, "same", 9.0)],
        [row(1, "slow", 6.0), row(2, "fast", 2.0), row(3, "a", 4.0)],
        [row(1, "fastest", 4.0), row(3, "b", 4.5), row(4, "same", 8.0)],
    )

    assert main(["table", "merge", out, *others]) == 0

    assert {found[2:] for found in rows(Path(out))} == {("fastest", 4.0), ("fast", 2.0), ("a", 4.0), ("same", 8.0)}
    said = capsys.readouterr().out
    assert said.count("conflict, the lowest time stays") == 3 and f"{out}: 4 rows, 3 conflicts" in said
    assert f"triton:fastest 4.00 us ({others[1]}:2), triton:old 5.00 us ({out}:2), triton:slow 6.00 us ({others[0]}:2)" in said


def test_a_time_that_is_none_never_wins(tables) -> None:
    """A placeholder row gives way to any time, and is kept where there is nothing else."""
    out, other = tables([row(1, "measured", 5.0)], [row(1, "placeholder", 0.0), row(2, "placeholder", 0.0)])

    assert main(["table", "merge", out, other]) == 0
    assert {found[:1] + found[2:] for found in rows(Path(out))} == {(1, "measured", 5.0), (2, "placeholder", 0.0)}


def test_nothing_else_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unknown columns of both sides survive, lines of OUT that are not understood, too; such lines of IN are named, exit code 1."""
    out, other = tmp_path / "out.csv", tmp_path / "in.csv"
    out.write_text(f"{HEAD}\nsm_90,132,1,64,128,triton,5,k,mine\nsm_90,132,banana,64,128,triton,5,k,odd\n")
    lines = ["sm_90,132,2,64,128,triton,5,k,bob", "sm_90,132,x,64,128,triton,5,k,odd", "sm_90,132,3,64,128,triton,0,k,", ""]
    other.write_text("\n".join([HEAD.replace("note", "owner"), *lines]))

    assert main(["table", "merge", str(out), str(other)]) == 1

    found = {found.shape.m: dict(found.extra) for found in read_rows(out, OP)[0]}
    assert found == {1: {"note": "mine"}, 2: {"owner": "bob"}, 3: {}}
    assert "banana" in out.read_text()
    said = capsys.readouterr().out
    assert f"left out: {other}:3" in said and f"note: {other}:4" in said and "1 lines left out" in said


def test_out_keeps_its_order_if_asked(tables) -> None:
    """Sorted by key unless --no-sort, wherever the flag stands."""
    out, other = tables([row(9), row(1)], [row(5)])

    assert main(["table", "merge", "--no-sort", out, "--op", "a16w16", other]) == 0
    assert [found.shape.m for found in read_rows(Path(out), OP)[0]] == [9, 1, 5]
    assert main(["table", "merge", out, other]) == 0
    assert [found.shape.m for found in read_rows(Path(out), OP)[0]] == [1, 5, 9]


def test_a_broken_input_changes_nothing(tables, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All inputs are read first: a file that is no table, or OUT among the inputs, ends it with OUT as it was."""
    out, other = tables([row(1)], [row(2)])
    before = Path(out).read_text()
    (tmp_path / "foreign.csv").write_text("epoch,loss\n1,0.5\n")

    assert main(["table", "merge", out, other, str(tmp_path / "foreign.csv")]) == 2
    assert main(["table", "merge", out, other, out]) == 2
    assert Path(out).read_text() == before
    err = capsys.readouterr().err
    assert "foreign.csv: lacks the column" in err and "is both OUT and IN" in err


def test_merges_at_the_same_time_lose_nothing(tables, tmp_path: Path) -> None:
    """Four processes that merge into one table at once: the rows of all are there."""
    paths, out = tables(*([row(m) for m in range(start, 200, 4)] for start in range(4))), tmp_path / "out.csv"
    path = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-m", "tunedgemm", "table", "merge", str(out)]
    running = [subprocess.Popen([*command, each], env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.DEVNULL) for each in paths]

    assert [process.wait(60) for process in running] == [0] * 4
    assert {found[0] for found in rows(out)} == set(range(200))


def test_verbose_before_and_after_the_action(tables, capsys: pytest.CaptureFixture[str]) -> None:
    """-v is understood in both places."""
    (path,) = tables([attrs.evolve(row(1), err_ratio=0.5)])

    assert main(["table", "-v", "check", path]) == main(["table", "check", "-v", path]) == 1
    assert capsys.readouterr().out.count("err_ratio 0.5 is over 0.2") == 2
