"""List the kernels worth timing for products of mxfp4 weights, and their neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import attrs
from tunedgemm.plugin import Device, Shape

from tunedgemm_triton.cost import useful_splits
from tunedgemm_triton.mx.names import Mx
from tunedgemm_triton.mx.resources import decodes, scaled_rows, shares_registers, tiles_of
from tunedgemm_triton.resources import ceil_div
from tunedgemm_triton.tiles import neighbours as steps
from tunedgemm_triton.wn.names import Wn

Tile = TypeVar("Tile", Mx, Wn)

#: Most solutions of one shape.
MOST = 48

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)

#: Few rows: block_n, block_k, warps, stages, transposed.
FEW = (
    (64, 256, 4, 4, True), (64, 512, 4, 3, True), (64, 128, 4, 5, True), (128, 256, 4, 3, True), (64, 256, 8, 4, True),
    (128, 128, 4, 4, True),
    (32, 256, 4, 4, False), (32, 512, 4, 3, False), (64, 256, 4, 4, False), (32, 128, 2, 5, False), (128, 256, 8, 3, False),
)  # fmt: skip

#: Many rows: block_m, block_n, block_k, warps, stages.
MANY = (
    (128, 128, 128, 8, 3), (128, 128, 128, 4, 3), (64, 128, 128, 4, 4), (64, 128, 256, 8, 3), (128, 256, 128, 8, 3), (128, 128, 256, 8, 3),
    (256, 128, 128, 8, 3), (64, 64, 256, 4, 4), (128, 64, 128, 4, 4), (64, 256, 128, 8, 3), (64, 64, 128, 4, 4), (128, 128, 64, 4, 4),
)  # fmt: skip


#: The first for many rows where mma's decoded operands leave few registers.
_DECODED = (64, 128, 128, 8, 3)


def neighbours(kernel: Mx, split: int, shape: Shape) -> Iterator[tuple[Mx, int]]:
    """Yield a kernel with one parameter, or splitK, moved one step."""
    yield from moved(kernel, split, shape)
    yield attrs.evolve(kernel, swap=not kernel.swap), split
    yield attrs.evolve(kernel, decode=not kernel.decode), split


def moved(kernel: Tile, split: int, shape: Shape) -> Iterator[tuple[Tile, int]]:
    """Yield a tile kernel with one number, or splitK, moved one step."""
    ladders = {
        "block_m": (16, 32, 64, 128, 256), "block_n": (16, 32, 64, 128, 256), "block_k": (64, 128, 256, 512), "group_m": (1, 2, 4, 8, 16),
        "warps": (1, 2, 4, 8), "stages": tuple(range(1, 9)),
    }  # fmt: skip
    yield from ((kernel, other) for other in steps(SPLITS, split))
    if shape.m <= kernel.block_m:  # a group larger than the tiles along M is the same kernel
        del ladders["group_m"]
    for field, ladder in ladders.items():
        yield from ((attrs.evolve(kernel, **{field: value}), split) for value in steps(ladder, getattr(kernel, field)))


def candidates(shape: Shape, device: Device) -> Iterator[tuple[Mx, int]]:
    """Yield the kernels worth timing for a shape."""
    for rank in range(3):
        for decode in decodes(device.gfx, shape.dtype):
            for kernel in _kernels(shape, device, decode=decode):
                splits = useful_splits(SPLITS, tiles_of(kernel, shape), ceil_div(shape.k, kernel.block_k), 2, device)
                if rank < len(splits):
                    yield kernel, splits[rank]


def _kernels(shape: Shape, device: Device, *, decode: bool) -> Iterator[Mx]:
    """Yield the tiles for a class of M, transposed where they have fewer rows of x than the
    instruction takes.

    AMD's matrix instruction has no long side to turn, and its loop keeps one tile in LDS.
    """
    amd, covered, rows = device.kind == "amd", max(16, 1 << (shape.m - 1).bit_length()), 1 if decode else scaled_rows(device.gfx)
    if shape.m <= 64:
        for block_n, block_k, warps, stages, swap in FEW:
            turned = (swap and not amd) or rows > covered
            yield Mx(covered, max(block_n, rows), block_k, 1, warps, 2 if amd else stages, turned, decode)
    else:
        for block_m, block_n, block_k, warps, stages in (_DECODED, *MANY) if shares_registers(device.gfx, decode) else MANY:
            if block_m <= covered:
                yield Mx(block_m, block_n, block_k, 8, warps, 2 if amd else stages, rows > block_m, decode)
