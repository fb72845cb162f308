"""``tunedgemm table export``: texts that other programs would run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tunedgemm.cli import main
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, read_rows, write_rows

OP = op_named("a16w16")


def names(path: Path) -> set[str]:
    return {row.solution.kernel_name for row in read_rows(path, OP)[0]}


@pytest.mark.parametrize("name", ["@SUM(1)", "=1+1", "+cmd|x", "-2+3", "-k"])
def test_a_formula_of_a_spreadsheet_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """The export leaves out and counts a row whose text a spreadsheet would run; our table keeps it."""
    table, out = tmp_path / "t.csv", tmp_path / "out.csv"
    fields = {"gfx": "sm_90", "cu_num": 132, "device": "nvidia-h200", "us": 5.0}
    kernels = enumerate([name, "_ZN5k"], 1)
    write_rows(table, OP, [Row(shape=Shape("a16w16", m, 64, 128), solution=Solution("triton", kernel), **fields) for m, kernel in kernels])
    assert main(["table", "export", "--aiter", str(out), str(table)]) == 0
    assert f"left out: 1 rows: a spreadsheet would run a cell that begins with {name[0]}" in capsys.readouterr().out
    assert names(out) == {"_ZN5k"} and names(table) == {name, "_ZN5k"}
