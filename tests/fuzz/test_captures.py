"""The captured file: calls are added to any content, and no line that others wrote is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tunedgemm.errors import TableError
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.table.untuned import Untuned, read_listed, untuned_text
from tunedgemm.workload.capturefile import CaptureFile


@pytest.mark.parametrize("name", ["a16w16", "fmoe"])
def test_captured_files(
    fuzz: Any, mutations: ModuleType, corpus: Callable[..., list[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Adding to a changed file keeps each of its lines, and its shapes have the calls once."""
    op = op_named(name)
    known, new = (list(op.examples) or [Shape(name, 4, 32, 64), Shape(name, 5, 32, 64)])[:2]
    path = tmp_path / op.columns.untuned_file

    def check(content: bytes) -> None:
        for write in (_entered, _added):
            path.write_bytes(content)
            before = _counts(path, name)
            capture = CaptureFile(op, path)
            try:
                done = write(capture, {known: (2, 0), new: (1, 1)})
            except TableError as error:
                assert str(path) in str(error) and "\n" not in str(error), error
                assert path.read_bytes() == content
                continue
            after = _counts(path, name)
            assert all(after.get(shape, 0) >= count for shape, count in before.items())
            if done and before is not after:
                assert known in after and new in after
            assert len(path.read_bytes().splitlines()) >= len(content.strip(b" \t,\r\n").splitlines())

    text = untuned_text(op, [Untuned(known, 3, 1)]).encode()
    fuzz([text, *(corpus("lists") if name == "a16w16" else [])], mutations.of_csv, check)


def _entered(capture: CaptureFile, rows: dict[Shape, tuple[int, int]]) -> bool:
    return capture.enter(rows, 1.0) is not None


def _added(capture: CaptureFile, rows: dict[Shape, tuple[int, int]]) -> bool:
    capture.add(rows, 1.0)
    return capture.enter(rows, 1.0) is not None


def _counts(path: Path, name: str) -> dict[Shape, int]:
    try:
        return {row.shape: row.calls for row in read_listed(path, op_named(name))[0]}
    except TableError:
        return {}
