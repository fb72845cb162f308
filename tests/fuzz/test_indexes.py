"""Forged indexes of large tables: the table's rows, or fewer of them, and no traceback."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tunedgemm.backends.artifact import cache_folder
from tunedgemm.device import Device
from tunedgemm.errors import TableError
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table import indexfile
from tunedgemm.table.csvfile import Row, read_rows, write_rows
from tunedgemm.table.lookup import Table

OP = op_named("a16w16")
MI300X = Device("gfx942", 304, "mi300x")


def test_indexes(fuzz: Any, mutations: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A changed index whose digest was made again never gives a row that its table lacks."""
    monkeypatch.setattr(indexfile, "LARGE", 0)
    path = tmp_path / "table.csv"
    monkeypatch.setenv(OP.columns.variable, str(path))  # the shipped tables are no layers then
    rows = [Row(Shape("a16w16", m, 64, 128), "gfx942", 304, "mi300x", Solution("torch", f"k{m}"), 5.0 + m % 3) for m in (1, 2, 2, 4, 8)]
    write_rows(path, OP, rows)
    assert len(Table.load(OP).rows) == 5
    [index] = (cache_folder() / "tables").glob("*.index")
    digest = len(hashlib.blake2b(digest_size=32).digest())
    pristine = index.read_bytes()[digest:]
    head, numbers = pristine[: pristine.index(b"\n")], pristine[pristine.index(b"\n") + 1 :]
    known = set(read_rows(path, OP)[0])

    def mutate(_: bytes, changes: list[Any]) -> bytes:
        of_head, of_numbers = [change for change in changes if change[0] % 2], [change for change in changes if not change[0] % 2]
        return mutations.of_json(head, of_head) + b"\n" + mutations.of_bytes(numbers, [(kind // 2, *at) for kind, *at in of_numbers])

    def check(body: bytes) -> None:
        index.write_bytes(hashlib.blake2b(body, digest_size=digest).digest() + body)
        table = Table.load(OP)
        for m in (1, 2, 4, 8, 300):
            assert {match.row for match in table.candidates(Shape("a16w16", m, 64, 128), MI300X)} <= known
        try:
            assert {*table.rows, *table.rows_for(MI300X)} <= known
            table.fingerprint()
        except TableError as error:
            assert index.name in str(error), error

    fuzz([pristine], mutate, check)
