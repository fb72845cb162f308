"""``tunedgemm table`` with bit classes: faults of `check`, and what merge, diff and export keep."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
from tunedgemm.cli import main
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import read_rows, write_rows
from tunedgemm.table.row import Row

OP, A, B = op_named("a16w16"), "a" * 16, "b" * 16


def row(m: int, bit_class: str = A, us: float = 5.0, n: int = 64, kernel: str = "k") -> Row:
    return Row(Shape("a16w16", m, n, 128), "gfx942", 304, "mi300x", Solution("hipblaslt", kernel), us, bit_class=bit_class)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "bf16_tuned_gemm.csv"


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main(["table", *map(str, arguments)])
    return code, capsys.readouterr().out


def test_check_names_what_serves_no_call(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A group without M = 0, two classes in a group, and plain rows in the file are faults."""
    write_rows(path, OP, [row(0), row(8), row(16, B), row(8, n=128), row(32, "")])
    code, text = printed(capsys, "check", path)
    assert code == 1
    for line, fault in ((4, f"its class is {B}, that of the row with M = 0 is {A}"), (5, "no row with M = 0 of N=128, K=128")):
        assert f"{path}:{line}: not used in batch-invariant mode: {fault}" in text
    assert "1 row without a bit class, the first in line 6, next to rows with one" in text
    assert text.count("batch-invariant mode") == 3


def test_check_accepts_groups_of_one_class(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each group may have its own class; a class edited by hand is a fault of its line."""
    write_rows(path, OP, [row(0), row(8), row(0, B, n=128)])
    assert printed(capsys, "check", path)[1].startswith(f"{path}: 3 rows, no fault")
    path.write_text(path.read_text().replace(B, "mine"))
    code, text = printed(capsys, "check", path)
    assert code == 1 and f"{path}:4: 'bit_class' must be 16 hexadecimal digits" in text


def test_merge_diff_and_show_keep_the_class(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A merged table has the classes, and `diff` names a row whose class alone differs."""
    write_rows(path, OP, [row(0), row(8)])
    out = tmp_path / "out.csv"
    assert printed(capsys, "merge", out, path)[0] == 0
    assert [attrs.evolve(each, source=path) for each in read_rows(out, OP)[0]] == read_rows(path, OP)[0]
    assert [each["bit_class"] for each in json.loads(printed(capsys, "show", path, "--json")[1])["rows"]] == [A, A]
    write_rows(out, OP, [row(0, B), row(8)])
    code, text = printed(capsys, "diff", path, out)
    assert code == 1 and f"another class: a16w16 M=0 N=64 K=128 bf16->bf16 on mi300x/304: hipblaslt:k {A} -> {B}" in text


def test_class_rows_are_not_exported(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """AITER cannot keep to one class, so its table gets none of their rows."""
    write_rows(path, OP, [row(0), row(8), row(16, "")])
    code, text = printed(capsys, "export", "--aiter", tmp_path / "aiter.csv", path)
    assert code == 0 and "left out: 2 rows: a row of a bit class" in text
    assert "bit_class" not in (tmp_path / "aiter.csv").read_text()
    assert [each.shape.m for each in read_rows(tmp_path / "aiter.csv", OP)[0]] == [16]
