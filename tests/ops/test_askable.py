"""A shape that a table or a list may hold is one that some call asks for."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs
import pytest
import torch
from tunedgemm.device import device_of
from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import ShapeError, TunedGemmError
from tunedgemm.ops import ops
from tunedgemm.ops.op import Op
from tunedgemm.ops.scale_order import with_order
from tunedgemm.ops.weight_formats import FORMATS
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import infer_op, read_rows
from tunedgemm.table.lookup import Table
from tunedgemm.table.row import Row, key_shape
from tunedgemm.table.untuned import read_listed, read_untuned
from tunedgemm.testing.listed import listed
from tunedgemm.workload.lists import is_tuned_file

AITER = Path(__file__).parents[3] / "shared" / "aiter" / "configs"
EVERY = pytest.mark.parametrize("name", sorted(ops()))
#: Texts of each column, most of which go together with few others.
DTYPES = ["bf16", "fp16", "fp32", "fp64", "fp8", "fp8_e4m3fnuz", "fp8_e5m2", "int8", "uint8", "int32", "fp4x2", "int4", "e8m0"]
FLAGS = ["True", "False"]
WORDS = {
    **dict.fromkeys(("dtype", "outdtype", "q_dtype_w", "q_dtype_a", "x_dtype"), DTYPES),
    **dict.fromkeys(("bias", "scaleAB", "bpreshuffle", "use_g1u1", "doweight_stage1", "expert_parallel"), FLAGS),
    "scale": ["none", "tensor", "row", "block"],
    "layout": ["row", "aiter16x16", "aiter32x16", "aiter16x32", "columns128", "aiter16x16p8", "unknown"],
    "scale_order": ["row", "m_major", "m_major_padded", "aiter32x8", "128x4", "8x4"],
    "act_type": ["Silu", "Gelu", "Swiglu", "Situv2", "No"],
    "q_type": ["No", "per_Tensor", "per_Token", "per_1x32", "per_1x128", "per_128x128", "per_256x128"],
    "w_format": [*FORMATS, "unknown"],
    "gate_mode": ["interleave", "interleave_rows", "separated"],
    "options": ["bias1", "bias2 bias1", "quantised", "swiglu_limit=7.0", "swiglu_limit=2", "beta=2.0 linear_beta=1.0", "quantised bias1"],
}
SIZES = {
    "M": [0, 1, 2, 3, 4, 5, 16, 33], "N": [0, 1, 16, 32, 48, 128, 130, 256], "K": [0, 1, 32, 64, 96, 128, 256, 512],
    "B": [0, 1, 3], "token": [0, 1, 3, 16], "model_dim": [32, 64, 72, 96, 128], "inter_dim": [32, 40, 64, 96], "expert": [0, 1, 4],
    "topk": [-1, 1, 2, 5], "w_group": [0, 16, 32, 64, 128],
}  # fmt: skip


def drawn(op: Op, count: int) -> Iterator[tuple[Mapping[str, str], Shape]]:
    """Random lines of an op that its parser takes, and their shapes, each once."""
    draw, seen = random.Random(op.name), set()
    for _ in range(count):
        cells = {column: str(draw.choice(SIZES[column])) for column in op.columns.key if column in SIZES}
        for column in (*op.columns.key, *op.columns.own):
            if column in WORDS and (column in ("act_type", "q_type", "q_dtype_w", "q_dtype_a", "w_format") or draw.random() < 0.4):
                cells[column] = draw.choice(WORDS[column])
        if draw.random() < 0.8 and "q_dtype_a" in cells:
            cells |= {"q_dtype_a": cells["q_dtype_w"]} | ({"dtype": "bf16"} if draw.random() < 0.5 else {})
        try:
            shape = key_shape(op.columns.parse(cells))
        except (TunedGemmError, ValueError):
            continue
        if shape not in seen:
            seen.add(shape)
            yield cells, shape


@EVERY
def test_every_shape_of_a_line_is_asked_for_by_a_call(name: str) -> None:
    """Operands can be made of whatever a line says, and their call asks for exactly that shape."""
    op, faults, count = ops()[name], [], 0
    for cells, shape in drawn(op, 4000 if name == "fmoe" else 1600):
        if shape.m == 0:  # a row of any M
            continue
        count += 1
        try:
            operands = op.make_inputs(shape, torch.device("cpu"), 0)
            asked = key_shape(op.shape_of(*operands, otype=torch_dtype(shape.outdtype), **op.fields(shape)))
        except Exception as error:
            faults.append(f"{cells}: {type(error).__name__}: {error}")
            continue
        if asked != shape:
            faults.append(f"{cells}: the row has {shape}, the call {asked}")
    assert not faults, "\n".join(faults[:20])
    assert count > 30


@EVERY
def test_a_line_comes_back_in_one_form(name: str) -> None:
    """The texts of a line's shape are those of the same shape, which is its own canonical form."""
    op = ops()[name]
    for cells, shape in drawn(op, 700):
        assert op.as_asked(shape) == shape, cells
        assert key_shape(op.columns.parse(op.columns.format(shape))) == shape, cells


@listed(
    ("name", "cells", "fault"),
    [
        ("a16w16", {"scale": "row"}, r"scale must be none or tensor \(got row\)"),
        ("a16w16", {"dtype": "int8"}, r"dtype must be bf16 or .* \(got int8\)"),
        ("a16w16", {"outdtype": "int32"}, r"outdtype must be bf16 or .* \(got int32\)"),
        ("a16w16", {"layout": "unknown"}, r"layout must be row, .* \(got unknown\)"),
        ("a16w16", {"layout": "aiter32x16", "N": "16"}, r"layout: aiter32x16 of bf16 needs N divisible by 32 \(got N=16\)"),
        ("a16w16", {"bpreshuffle": "True", "dtype": "fp64"}, r"needs elements of 1, 2 or 4 bytes \(got fp64\)"),
        ("a16w16", {"M": "2147483647", "N": "2147483647"}, r"sizes of at most 16 TiB fit a memory"),
        ("a8w8_bpreshuffle", {"K": "48"}, r"layout: aiter16x16 of fp8_e4m3fn needs K divisible by 32 \(got K=48\)"),
        ("a4w4_blockscale", {"layout": "columns128"}, r"columns128 of fp4x2 needs K divisible by 256 \(got K=64\)"),
        ("batched_bf16", {"B": "0"}, r"B must be at least 1 \(got 0\)"),
    ],
)
def test_a_line_that_no_call_asks_for_is_named(name: str, cells: Mapping[str, str], fault: str) -> None:
    """The message has the field, its value and what would fit."""
    op, sizes = ops()[name], {"B": "2", "M": "4", "N": "64", "K": "64"}
    line = {column: sizes[column] for column in op.columns.key if column in sizes} | dict(cells)
    with pytest.raises(ShapeError, match=f"^{name}: no call asks for this shape: .*{fault}"):
        op.columns.parse(line | {"gfx": "gfx950"})


@listed(
    ("name", "change", "fault"),
    [
        ("a16w16", {"bias_dtype": "int8", "epilogue": "bias"}, r"bias_dtype must be bf16 or fp16 or fp32 or fp64 \(got int8\)"),
        ("a16w16", {"extra": {"scale_order": "m_major"}}, "scale_order: the op has no such field"),
        ("a8w8_blockscale", {"epilogue": "bias"}, "bias: the op adds none"),
        ("batched_bf16", {"extra": {}}, "B: is missing"),
        ("batched_bf16", {"layout": "aiter16x16"}, r"layout: the op takes plain weights \(got aiter16x16\)"),
        ("a8w8_bpreshuffle", {"layout": "row"}, r"layout: the op takes shuffled weights \(got row\)"),
    ],
)
def test_a_shape_that_is_given_is_judged_like_a_line(name: str, change: Mapping[str, object], fault: str) -> None:
    """Shapes of a program reach the same check as those of files."""
    op = ops()[name]
    with pytest.raises(ShapeError, match=fault):
        op.as_asked(attrs.evolve(op.examples[0] if op.examples else Shape(name, 4, 64, 64), **change))


class TestOrdersOfOneRow:
    """The scales of one row of x, and of one block of K, are in every order."""

    OP = ops()["a8w8_blockscale"]
    HEAD = "gfx,cu_num,M,N,K,libtype,kernelId,splitK,us,kernelName,tflops,bw,errRatio,scale_order\n"

    def served(self, path: Path, body: str, shape: Shape) -> list[str]:
        """The kernels of the rows that answer for a shape, best first."""
        path.write_text(self.HEAD + body)
        here = device_of(-1)
        rows, problems = read_rows(path, self.OP)
        assert not problems
        table = Table(self.OP, [[attrs.evolve(row, gfx=here.gfx, cu_num=here.cu_num) for row in rows]])
        return [match.row.solution.kernel_name for match in table.candidates(shape, here)]

    def test_rows_tuned_as_m_major_serve_one_row_by_their_times(self, tmp_path: Path) -> None:
        """Tables with the key of another order serve, and its rows compete with those of the usual one."""
        line = "gfx942,304,1,256,512,torch,0,0,{us},{name},1,1,0,{order}\n"
        body = "".join(
            line.format(us=us, name=name, order=order) for us, name, order in ((3, "c", ""), (1, "a", "m_major"), (2, "b", "row"))
        )
        shape = self.OP.columns.parse({"M": "1", "N": "256", "K": "512", "gfx": "gfx942"})
        assert self.served(tmp_path / self.OP.columns.tuned_file, body, shape) == ["a", "b", "c"]

    def test_m_major_rows_of_a_padded_m_serve_one_row(self, tmp_path: Path) -> None:
        """A call of one row finds M-major rows of 16, after the row-major ones; one of two rows does not."""
        line = "gfx942,304,16,256,512,torch,0,0,{us},{name},1,1,0,{order}\n"
        body = line.format(us=1, name="major", order="m_major") + line.format(us=2, name="row", order="")
        for m, found in ((1, ["row", "major"]), (2, ["row"])):
            shape = self.OP.columns.parse({"M": str(m), "N": "256", "K": "512", "gfx": "gfx942"})
            assert self.served(tmp_path / self.OP.columns.tuned_file, body, shape) == found

    def test_lists_and_programs_name_the_order_of_a_call(self, tmp_path: Path) -> None:
        """A list's lines of one shape become one, and a shape that is given is the one that its call asks for."""
        path = tmp_path / self.OP.columns.untuned_file
        path.write_text("M,N,K,scale_order,count\n1,256,512,m_major,2\n1,256,512,,3\n64,256,512,m_major_padded,1\n64,256,512,m_major,1\n")
        shapes = [(line.shape.m, dict(line.shape.extra), line.count) for line in read_untuned(path, self.OP)]
        assert shapes == [(1, {}, 5), (64, {"scale_order": "m_major"}, 2)]
        shape = self.OP.columns.parse({"M": "9", "N": "256", "K": "128"})
        assert self.OP.as_asked(with_order(shape, "m_major")) == shape


def test_a_tuned_row_is_the_row_of_its_call() -> None:
    """A row made of any example of an op answers for the call of that example first."""
    here = device_of(-1)
    for op in ops().values():
        for shape in op.examples:
            if shape.m:
                table = Table(op, [[Row(shape, here.gfx, here.cu_num, "", Solution("torch", "own"), 1.0)]])
                assert next(table.candidates(shape, here)).row.shape == key_shape(shape)


@pytest.mark.skipif(not AITER.is_dir(), reason="AITER's files are not here")
def test_aiters_files_hold_shapes_that_calls_ask_for() -> None:
    """No line of AITER's tables and lists is a shape that no call asks for."""
    faults = []
    for path in sorted(AITER.rglob("*.csv")):
        try:
            op = infer_op([path])
            problems = read_rows(path, op)[1] if is_tuned_file(path) else read_listed(path, op)[1]
        except TunedGemmError:  # a file of another kind
            continue
        faults += [str(problem) for problem in problems if "no call asks" in problem.reason and "grouped experts" not in problem.reason]
    assert faults == []
