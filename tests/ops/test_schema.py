"""Schema: columns as data, read and written by one reader and one writer."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tunedgemm import dtype
from tunedgemm.errors import UserError
from tunedgemm.ops import ops
from tunedgemm.ops.quantised import FP8
from tunedgemm.ops.schema import BIAS, MNK, Column, Dtype, Schema, ShuffledLayout, Size, Word
from tunedgemm.shape import Shape
from tunedgemm.table.row import RowReader
from tunedgemm.table.sheet import Record

SCHEMA = Schema(
    {"op": "toy", "scale": "row"},
    key=(Size("B", "B"), *MNK, Dtype("dtype", "dtype", "fp8", allowed=FP8)),
    own=(
        Column("layout", "layout", lambda shape: "row" if shape.n < 64 else "aiter16x16"),
        Dtype("outdtype", "outdtype", "bf16", allowed=("bf16", "fp16")),
        BIAS,
        Word("order", "order", "near", spare=True, allowed=("near", "far")),
        Word("side", "side", lambda shape: "left" if shape.k < 64 else "right", spare=True, allowed=("left", "right")),
    ),
)
LINE = {"B": "2", "M": "4", "N": "128", "K": "256", "gfx": "gfx950"}
KEY = {"B": "2", "M": "4", "N": "128", "K": "256", "dtype": "torch.float8_e4m3fn"}


def filled(cells: dict[str, str]) -> dict[str, str]:
    return {column: text for column, text in cells.items() if text}


def test_a_line_of_sizes_has_the_defaults() -> None:
    """Empty cells, AITER's filler 0 and absent columns mean one shape, written without own columns."""
    shape = SCHEMA.parse(LINE)
    assert shape == Shape("toy", 4, 128, 256, "fp8_e4m3fn", "bf16", scale="row", layout="aiter16x16", extra=(("B", 2),))
    for filler in ("", "0"):
        assert SCHEMA.parse(LINE | dict.fromkeys(("dtype", "layout", "outdtype", "bias", "order", "side"), filler)) == shape
    assert filled(SCHEMA.format(shape)) == KEY


@pytest.mark.parametrize(
    "cells",
    [
        {"layout": "row"},
        {"outdtype": "torch.float16"},
        {"bias": "True"},
        {"N": "32", "layout": "aiter16x16"},
        {"order": "far"},
        {"side": "left"},
        {"K": "32", "side": "right", "order": "far"},
        {"M": "0"},
        {"M": "1234567890"},
    ],
)
def test_written_cells_are_read_back(cells: dict[str, str]) -> None:
    """A cell other than the default is written as it was read; the plain shape has none of ours."""
    shape = SCHEMA.parse(LINE | cells)
    assert filled(SCHEMA.format(shape)) == KEY | cells
    assert SCHEMA.parse(filled(SCHEMA.format(shape)) | {"gfx": "gfx950"}) == shape
    plain = SCHEMA.plain(shape)
    assert filled(SCHEMA.format(plain)) == {column: (KEY | cells)[column] for column in KEY}
    assert SCHEMA.equivalent_shapes(shape) == tuple(dict.fromkeys((shape, plain)))


def test_a_spare_field_is_absent_at_its_default() -> None:
    """A shape lacks a spare field at its default, whether that is a word or follows from the shape."""
    assert dict(SCHEMA.parse(LINE | {"order": "near", "side": "right"}).extra) == {"B": 2}
    assert dict(SCHEMA.parse(LINE | {"order": "far", "side": "left"}).extra) == {"B": 2, "order": "far", "side": "left"}


@pytest.mark.parametrize(
    ("column", "text"),
    [("M", "1.5"), ("M", "-1"), ("N", str(1 << 31)), ("B", ""), ("dtype", "bf16"), ("outdtype", "fp32"), ("bias", "yes"), ("side", "up")],
)
def test_a_wrong_cell_is_named(column: str, text: str) -> None:
    """A wrong text is refused with the names of its column and of the text, in every line that has it."""
    for m in ("4", "5"):
        with pytest.raises(UserError, match=rf"column '{column}' .*\(got '{text}'\)"):
            SCHEMA.parse({**LINE, "M": m, column: text})


def test_plain_weights_are_refused_where_all_are_shuffled() -> None:
    """A family of shuffled weights takes any layout but the plain one."""
    schema = Schema({"op": "toy"}, MNK, (ShuffledLayout(),))
    assert [schema.parse(LINE | {"layout": layout}).layout for layout in ("", "aiter32x16")] == ["aiter16x16", "aiter32x16"]
    with pytest.raises(UserError, match="must name a shuffled layout"):
        schema.parse(LINE | {"layout": "row"})


def test_fp8_is_that_of_each_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The word fp8 means the kind of the line's architecture, else of the device present at that moment."""
    line = {column: text for column, text in LINE.items() if column != "gfx"}
    for gfx, kind in (("gfx942", FP8[1]), ("gfx950", FP8[0]), ("gfx942", FP8[1])):
        monkeypatch.setattr(dtype, "_present_gfx", lambda gfx=gfx: gfx)
        assert SCHEMA.parse(line).dtype == SCHEMA.parse(line | {"gfx": ""}).dtype == SCHEMA.parse(line | {"gfx": gfx}).dtype == kind


@pytest.mark.parametrize("name", ["a16w16", "a8w8", "a8w8_bpreshuffle", "a8w8_blockscale", "a4w4_blockscale", "batched_bf16"])
def test_a_row_takes_few_calls(name: str) -> None:
    """A row takes at most 80 Python calls, and at most 130 where its layer is new to the process."""
    op, calls = ops()[name], 0
    sizes = {column: str(256 * at) for at, column in enumerate(("B", "M", "N", "K"), 1) if column in op.columns.key}
    cells = {**sizes, "gfx": "gfx950", "cu_num": "256", "libtype": "ck", "kernelName": "kernel", "us": "3.25"}

    def counted(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    reader = RowReader(Path("t.csv"), op)
    for m, most in (("8", 130), ("16", 80)):
        calls = 0
        sys.setprofile(counted)
        rows = reader.rows(Record(2, cells | {"M": m}))
        sys.setprofile(None)
        assert rows[0].shape.m == int(m)
        assert calls <= most, calls
