"""Problem: what a kernel is told of a shape: the values of its arguments but for addresses, its grid, and what it needs beside operands.

Strides are in the unit that each layout of arguments wants (``abi.py``); grids are those of AITER's launchers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
from tunedgemm.plugin import Shape
from tunedgemm.tools import dtype_bits

from tunedgemm_asm.limits import COUNTERS, ceil_div, part_of
from tunedgemm_asm.manifest import Kernel

#: Addresses in the order in which a launch gets them, by the names of their fields.
ADDRESSES = ("out", "a", "b", "a_scale", "b_scale", "bias", "workspace", "semaphore")
#: Elements of x, and rows of the weight, that share a scale of a block.
_BLOCK = 128
#: Elements of K that share a scale of mxfp4, and of how many such groups a row of shuffled scales has a multiple.
_GROUP, _GROUPS = 32, 8
#: Rows of which AITER's fp4 kernels write a multiple.
_ROWS = 32


@attrs.frozen
class Problem:
    """A shape as a kernel is told it.

    Attributes:
        values: the arguments that are no addresses, by field.
        addresses: of `ADDRESSES` those that a launch gets.
        grid: workgroups along the three axes.
        rows: of the output's memory; what lies beyond M is nobody's.
        zeroed: whether parts of K are added to the output, which is zero before.
        absent_bias: whether float32 zeros [N] stand for a bias.
        workspace: bytes of scratch memory.
        counters: counters that are zero before and after.
    """

    values: Mapping[str, int | float]
    addresses: tuple[str, ...]
    grid: tuple[int, int, int]
    rows: int
    zeroed: bool = False
    absent_bias: bool = False
    workspace: int = 0
    counters: int = 0


def problem_of(kernel: Kernel, splits: int, shape: Shape) -> Problem:
    """What a kernel is told of a shape that it takes with so many parts of K; see `limits.refusal`."""
    return _MAKERS[kernel.abi](kernel, splits, shape)


def _tiles(kernel: Kernel, shape: Shape) -> tuple[int, int]:
    """Tiles of the output along N and M."""
    return ceil_div(shape.n, kernel.tile_n), ceil_div(shape.m, kernel.tile_m)


def _bytes(dtype: str) -> int:
    return dtype_bits(dtype) // 8


def _given(*names: str) -> tuple[str, ...]:
    return tuple(name for name in ADDRESSES if name in names)


def _sizes(shape: Shape) -> dict[str, int | float]:
    return {"m": shape.m, "n": shape.n, "k": shape.k}


def _bf16(kernel: Kernel, splits: int, shape: Shape) -> Problem:
    """``asm_gemm_a16w16.cu``: strides in bytes; a semaphore where K is split."""
    tiles_n, tiles_m = _tiles(kernel, shape)
    out, row, split = shape.n * _bytes(shape.outdtype), shape.k * _bytes(shape.dtype), splits > 1
    values = {"alpha": 1.0, "beta": 0.0, "stride_out0": out, "stride_c0": out, "stride_a0": row, "stride_b0": row, **_sizes(shape)}
    values |= {"splits": splits, "out_is_bf16": int(shape.outdtype == "bf16"), "add_bias": int(shape.bias)}
    names = _given("out", "a", "b", *["bias"] * shape.bias, *["semaphore"] * split)
    return Problem(values, names, (tiles_n, tiles_m, splits), shape.m, counters=COUNTERS if split else 0)


def _scaled(kernel: Kernel, splits: int, shape: Shape) -> Problem:
    """``asm_gemm_a8w8.cu``: strides of operands in elements, of the output in bytes; parts of K lie along the first axis of the grid."""
    tiles_n, tiles_m = _tiles(kernel, shape)
    strides = {"stride_a": shape.k, "stride_b": shape.k, "stride_out": shape.n * _bytes(shape.outdtype)}
    names = _given("out", "a", "b", "a_scale", "b_scale", "bias")
    grid = (tiles_n * splits, tiles_m, 1)
    values = {**_sizes(shape), **strides, "splits": splits}
    return Problem(values, names, grid, shape.m, zeroed=splits > 1, absent_bias=not shape.bias)


def _blocks(kernel: Kernel, splits: int, shape: Shape) -> Problem:
    """``asm_a8w8_blockscale_bpreshuffle.cu``: as of int8, and the sizes of the scales, those of x lying transposed."""
    problem = _scaled(kernel, splits, shape)
    scales = {"scale_m": shape.m, "scale_n": ceil_div(shape.n, _BLOCK), "scale_k": ceil_div(shape.k, _BLOCK)}
    return attrs.evolve(problem, values={**problem.values, **scales})


def _fp4(kernel: Kernel, splits: int, shape: Shape) -> Problem:
    """``asm_gemm_a4w4.cu``: strides of operands in values, of the output in elements, of scales in bytes; rows of the output in wholes."""
    tiles_n, tiles_m = _tiles(kernel, shape)
    groups = ceil_div(ceil_div(shape.k, _GROUP), _GROUPS) * _GROUPS
    values = {"alpha": 1.0, "beta": 0.0, "stride_c0": shape.n, "stride_a0": shape.k, "stride_b0": shape.k, **_sizes(shape)}
    values |= {"stride_a_scale0": groups, "stride_b_scale0": groups, "log2_splits": splits.bit_length() - 1}
    grid = (tiles_n, tiles_m, ceil_div(shape.k, part_of(kernel, splits, shape)))
    names = _given("out", "a", "b", "a_scale", "b_scale")
    return Problem(values, names, grid, ceil_div(shape.m, _ROWS) * _ROWS, zeroed=splits > 1)


def _own(kernel: Kernel, splits: int, shape: Shape) -> Problem:
    """Kernels of ``gcn``: strides in bytes, tiles along one axis; parts of K meet in scratch memory."""
    tiles_n, tiles_m = _tiles(kernel, shape)
    row, tiles, split = shape.k * _bytes(shape.dtype), tiles_m * tiles_n, splits > 1
    values = {"stride_out": shape.n * _bytes(shape.outdtype), "stride_a": row, "stride_b": row, **_sizes(shape)}
    values |= {"tiles_m": tiles_m, "tiles_n": tiles_n, "splits": splits, "k_part": part_of(kernel, splits, shape)}
    values |= {"out_is_bf16": int(shape.outdtype == "bf16"), "add_bias": int(shape.bias)}
    names = _given("out", "a", "b", *["bias"] * shape.bias, *["workspace", "semaphore"] * split)
    workspace = 4 * splits * tiles * kernel.tile_m * kernel.tile_n if split else 0
    return Problem(values, names, (tiles, 1, splits), shape.m, workspace=workspace, counters=COUNTERS if split else 0)


_MAKERS: dict[str, Callable[[Kernel, int, Shape], Problem]] = {
    "aiter-bf16gemm": _bf16,
    "aiter-i8gemm": _scaled,
    "aiter-fp8gemm-blockscale": _blocks,
    "aiter-f4gemm": _fp4,
    "tunedgemm-bf16": _own,
}
