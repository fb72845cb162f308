"""Tables and lists of shapes of every op: rows that round-trip, or faults with file and line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
from tunedgemm.device import Device
from tunedgemm.errors import TableError, UserError
from tunedgemm.ops import op_named, ops
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, fold, infer_op, read_rows, upsert, write_rows
from tunedgemm.table.lookup import Table
from tunedgemm.table.published import Provenance, is_published, provenance_of, published_text
from tunedgemm.table.source import open_source
from tunedgemm.table.untuned import Untuned, read_listed, read_shapes, read_untuned, untuned_text, write_untuned

Corpus = Callable[..., list[bytes]]
#: The part of a reader's time for each op.
SHARE = 0.2
OPS = sorted(name for name, op in ops().items() if type(op).__module__ == "tunedgemm.ops.op")


def some_shapes(op: Op) -> list[Shape]:
    """Return a few shapes of an op."""
    return list(op.examples[:3]) or [Shape(op.name, 4, 32, 64), Shape(op.name, 33, 64, 96)]


def table_of(op: Op, path: Path) -> bytes:
    """Return a small table of an op."""
    devices = (("gfx942", 304, "mi300x"), ("", 0, ""), ("cpu-avx2", 2, "cpu"))
    shapes = zip(some_shapes(op), devices, strict=False)
    rows = [Row(shape, *device, Solution("torch", "native", at), 5.5 + at, libver="2.1") for at, (shape, device) in enumerate(shapes)]
    write_rows(path, op, rows)
    return path.read_bytes()


def rounded(rows: list[Row]) -> Counter[Row]:
    """Count rows with their times as tables round them; NaN equals NaN, and extra columns do not count."""
    numbers = [{"us": str(round(row.us, 4)), "err_ratio": str(round(row.err_ratio, 4))} for row in rows]
    return Counter(attrs.evolve(row, **number, extra=()) for row, number in zip(rows, numbers, strict=True))


@pytest.mark.parametrize("name", OPS)
def test_tables(fuzz: Any, mutations: ModuleType, corpus: Corpus, tmp_path: Path, name: str) -> None:
    """Reading, scanning, looking up, rewriting and merging a changed table agree on its rows."""
    op = op_named(name)
    path, copy = tmp_path / "table.csv", tmp_path / "copy.csv"

    def check(content: bytes) -> None:
        path.write_bytes(content)
        try:
            rows, problems = read_rows(path, op)
        except TableError as error:
            assert str(path) in str(error) and "\n" not in str(error), error
            assert not _upserted(path, op)
            assert path.read_bytes() == content
            return
        assert all(problem.path == path and problem.reason for problem in problems)
        source = open_source(path, op)
        assert sorted(map(str, source)) == sorted(map(str, rows))
        _look_up(op, path, rows)
        write_rows(copy, op, rows)
        assert rounded(read_rows(copy, op)[0]) == rounded(rows)
        if _upserted(path, op):
            after = rounded(read_rows(path, op)[0])
            assert not rounded([row for row in rows if row.shape != _other(op).shape]) - after
        fold(copy, op, rows)

    aiters = (f"configs/{op.columns.tuned_file}",)
    fuzz([table_of(op, path), *corpus("tables" if name == "a16w16" else name, *aiters)], mutations.of_csv, check, share=SHARE)


def test_published_tables(fuzz: Any, mutations: ModuleType, tmp_path: Path) -> None:
    """A changed published table is refused, or gives the rows and facts that were published."""
    op, path = op_named("a16w16"), tmp_path / "table.csv"
    stated = Provenance(op.name, {"device": "gfx942, 304 CUs", "driver": "AMD 6.12", "tuned": "2026-11-24"})
    content = published_text(stated, table_of(op, path).decode()).encode()
    published = read_rows(path, op)[0]

    def check(content: bytes) -> None:
        path.write_bytes(content)
        try:
            rows, _ = read_rows(path, op)
            found = provenance_of(path)
        except TableError as error:
            assert str(path) in str(error) and "\n" not in str(error), error
            return
        if is_published(content):
            assert rows == published == list(open_source(path, op)) and found == stated
            assert not _upserted(path, op) and path.read_bytes() == content

    check(content)
    fuzz([content], mutations.of_csv, check, share=SHARE)


def _other(op: Op) -> Row:
    return Row(attrs.evolve(some_shapes(op)[0], m=77), "gfx942", 304, "mi300x", Solution("torch", "native"), 3.0)


def _upserted(path: Path, op: Op) -> bool:
    try:
        upsert(path, op, [_other(op)])
    except TableError:
        return False
    return True


def _look_up(op: Op, path: Path, rows: list[Row]) -> None:
    table = Table.load(op, [path])
    for row in rows[:3]:
        if row.valid and row.gfx and row.shape.m:
            device = Device(row.gfx, row.cu_num, row.device)
            assert row.shape in [match.row.shape for match in table.candidates(row.shape, device)] or row.shape.m not in op.padded_m(
                row.shape.m, row.shape.n
            )


@pytest.mark.parametrize("name", OPS)
def test_lists(fuzz: Any, mutations: ModuleType, corpus: Corpus, tmp_path: Path, name: str) -> None:
    """Reading a changed list of shapes returns shapes that round-trip, or names file and line."""
    op = op_named(name)
    path, copy = tmp_path / "list.csv", tmp_path / "copy.csv"

    def check(content: bytes) -> None:
        path.write_bytes(content)
        for read in (read_untuned, read_listed, read_shapes):
            try:
                result = read(path, op)  # type: ignore[operator]
            except TableError as error:
                assert str(path) in str(error) and "\n" not in str(error), error
                continue
            shapes = result if read is read_untuned else result[0]
            write_untuned(copy, op, shapes)
            assert read_untuned(copy, op) == shapes
        try:
            infer_op([path])
        except UserError as error:
            assert str(path) in str(error), error

    text = untuned_text(op, [Untuned(shape, 3, at, "qkv") for at, shape in enumerate(some_shapes(op))]).encode()
    fuzz([text, *corpus("lists" if name == "a16w16" else name, f"configs/{op.columns.untuned_file}")], mutations.of_csv, check, share=SHARE)
