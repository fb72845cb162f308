"""List the kernels worth timing for products of packed weights, and their neighbours."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
from tunedgemm.plugin import Device, Shape

from tunedgemm_triton.cost import useful_splits
from tunedgemm_triton.packed.names import OP, Mx, Wn
from tunedgemm_triton.packed.resources import decodes, scaled_of, scaled_rows, shares_registers, tiles_of
from tunedgemm_triton.resources import ceil_div
from tunedgemm_triton.tiles import neighbours as steps

#: Most solutions of one shape.
MOST = 48

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)

#: Few rows: block_n, block_k, warps, stages, transposed.
_FEW = (
    (64, 256, 4, 4, True), (64, 512, 4, 3, True), (64, 128, 4, 5, True), (128, 256, 4, 3, True), (64, 256, 8, 4, True),
    (128, 128, 4, 4, True),
    (32, 256, 4, 4, False), (32, 512, 4, 3, False), (64, 256, 4, 4, False), (32, 128, 2, 5, False), (128, 256, 8, 3, False),
)  # fmt: skip

#: Many rows: block_m, block_n, block_k, warps, stages.
_MANY = (
    (128, 128, 128, 8, 3), (128, 128, 128, 4, 3), (64, 128, 128, 4, 4), (64, 128, 256, 8, 3), (128, 256, 128, 8, 3), (128, 128, 256, 8, 3),
    (256, 128, 128, 8, 3), (64, 64, 256, 4, 4), (128, 64, 128, 4, 4), (64, 256, 128, 8, 3), (64, 64, 128, 4, 4), (128, 128, 64, 4, 4),
)  # fmt: skip

#: The first for many rows where mma's decoded operands leave few registers.
_DECODED = (64, 128, 128, 8, 3)
#: A tile for many rows that leaves registers for a decoded weight.
_WIDE = (128, 256, 64, 8, 4)
#: Stages of the largest step; of shorter ones, more are in flight.
_STAGES = 6


def neighbours(kernel: Wn, split: int, shape: Shape) -> Iterator[tuple[Wn, int]]:
    """Yield a kernel with one parameter, or splitK, moved one step."""
    ladders = {
        "block_m": (16, 32, 64, 128, 256), "block_n": (16, 32, 64, 128, 256), "block_k": (64, 128, 256, 512), "group_m": (1, 2, 4, 8, 16),
        "warps": (1, 2, 4, 8), "stages": tuple(range(1, 9)),
    }  # fmt: skip
    yield from ((kernel, other) for other in steps(SPLITS, split))
    if shape.m <= kernel.block_m:  # a group larger than the tiles along M is the same kernel
        del ladders["group_m"]
    for field, ladder in ladders.items():
        yield from ((attrs.evolve(kernel, **{field: value}), split) for value in steps(ladder, getattr(kernel, field)))
    for flag in ("swap", "decode") if isinstance(kernel, Mx) else ("swap",):
        yield attrs.evolve(kernel, **{flag: not getattr(kernel, flag)}), split


def candidates(shape: Shape, device: Device) -> Iterator[tuple[Wn, int]]:
    """Yield the kernels worth timing for a shape, those first that leave few multiprocessors idle."""
    kernels = list(dict.fromkeys(_of_format(shape, device) if shape.op == OP else _of_mxfp4(shape, device)))
    for rank in range(3):
        for kernel in kernels:
            splits = useful_splits(SPLITS, tiles_of(kernel, shape), ceil_div(shape.k, kernel.block_k), 2, device)
            if rank < len(splits):
                yield kernel, splits[rank]


def _covered(shape: Shape) -> int:
    """Return the rows of the smallest tile that has all of few rows."""
    return max(16, 1 << (shape.m - 1).bit_length())


def _of_mxfp4(shape: Shape, device: Device) -> Iterator[Mx]:
    """Yield the tiles for a class of M, transposed where they have fewer rows of x than the
    instruction takes.

    AMD's matrix instruction has no long side to turn, and its loop keeps one tile in LDS.
    """
    amd, covered = device.kind == "amd", _covered(shape)
    for decode in decodes(device.gfx, shape.dtype):
        rows = 1 if decode else scaled_rows(device.gfx)
        if shape.m <= 64:
            for block_n, block_k, warps, stages, swap in _FEW:
                turned = (swap and not amd) or rows > covered
                yield Mx(covered, max(block_n, rows), block_k, 1, warps, 2 if amd else stages, turned, decode)
            continue
        for block_m, block_n, block_k, warps, stages in (_DECODED, *_MANY) if shares_registers(device.gfx, decode) else _MANY:
            if block_m <= covered:
                yield Mx(block_m, block_n, block_k, 8, warps, 2 if amd else stages, rows > block_m, decode)


def _of_format(shape: Shape, device: Device) -> Iterator[Wn]:
    """Yield the tiles for a class of M; steps along K end with their group where its sums are
    scaled.
    """
    amd, covered = device.kind == "amd", _covered(shape)
    longest = int(shape["w_group"]) if scaled_of(shape) == "sums" else 512
    few, many = [(covered, *tile) for tile in _FEW], [(*tile, False) for tile in (*_MANY[:2], _WIDE, *_MANY[2:])]
    for block_m, block_n, block_k, warps, stages, swap in few if shape.m <= 64 else many:
        if block_m <= covered:
            step = min(block_k, longest)
            deep = 2 if amd else min(stages * block_k // step, max(stages, _STAGES))
            yield Wn(block_m, block_n, step, 1 if shape.m <= 64 else 8, warps, deep, swap and not amd)
