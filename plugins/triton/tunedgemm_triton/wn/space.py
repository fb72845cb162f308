"""List the kernels worth timing for products of weight-only formats, and their neighbours."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
from tunedgemm.plugin import Device, Shape

from tunedgemm_triton.cost import useful_splits
from tunedgemm_triton.mx.resources import tiles_of
from tunedgemm_triton.mx.space import FEW, MANY, MOST, SPLITS, moved
from tunedgemm_triton.resources import ceil_div
from tunedgemm_triton.wn.names import Wn
from tunedgemm_triton.wn.resources import scaled_of

__all__ = ["MOST", "candidates", "neighbours"]

#: A tile for many rows that leaves registers for the decoded weight.
_DECODED = (128, 256, 64, 8, 4)
#: Stages of the largest step; of shorter ones, more are in flight.
_STAGES = 6


def neighbours(kernel: Wn, split: int, shape: Shape) -> Iterator[tuple[Wn, int]]:
    """Yield a kernel with one parameter, or splitK, moved one step."""
    yield from moved(kernel, split, shape)
    yield attrs.evolve(kernel, swap=not kernel.swap), split


def candidates(shape: Shape, device: Device) -> Iterator[tuple[Wn, int]]:
    """Yield the kernels worth timing for a shape, those first that leave few multiprocessors idle."""
    kernels = list(dict.fromkeys(_kernels(shape, device)))
    for rank in range(3):
        for kernel in kernels:
            splits = useful_splits(SPLITS, tiles_of(kernel, shape), ceil_div(shape.k, kernel.block_k), 2, device)
            if rank < len(splits):
                yield kernel, splits[rank]


def _kernels(shape: Shape, device: Device) -> Iterator[Wn]:
    """Yield the tiles for a class of M; steps along K end with their group where its sums are
    scaled.
    """
    amd, covered = device.kind == "amd", max(16, 1 << (shape.m - 1).bit_length())
    longest = int(shape["w_group"]) if scaled_of(shape) == "sums" else 512
    few, many = [(covered, *tile) for tile in FEW], [(*tile, False) for tile in (*MANY[:2], _DECODED, *MANY[2:])]
    for block_m, block_n, block_k, warps, stages, swap in few if shape.m <= 64 else many:
        if block_m <= covered:
            step = min(block_k, longest)
            deep = 2 if amd else min(stages * block_k // step, max(stages, _STAGES))
            yield Wn(block_m, block_n, step, 1 if shape.m <= 64 else 8, warps, deep, swap and not amd)
