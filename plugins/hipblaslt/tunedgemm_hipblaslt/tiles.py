"""Sizes behind cuBLASLt's numbers of tiles and of cluster shapes: rows of D by columns of D, that is our N by our M."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

#: Numbers 1 to 38, in the order in which generations of GPUs brought them.
_FIRST = (
    "8x8 8x16 16x8 8x32 16x16 32x8 8x64 16x32 32x16 64x8 32x32 32x64 64x32 32x128 64x64 128x32 64x128 128x64 64x256 128x128 256x64 "
    "64x512 128x256 256x128 512x64 64x96 96x64 96x128 128x160 160x128 192x128 128x192 128x96 32x256 256x32 8x128 8x192 8x256"
)
#: Numbers from 631.
_LAST = "256x512 256x1024 512x512 512x1024 4x1 8x1 16x1 24x1 32x1 40x1 48x1 64x1 128x1 192x1 256x1"
#: Between them Hopper's: one side of wholes of 8, the other of 64, either way round, up to a number of elements.
_LARGEST, _TALL, _WIDE = 768, 49152, 65536

#: Numbers from 2; 0 lets the library choose.
_CLUSTERS = (
    "1x1 2x1 4x1 1x2 2x2 4x2 1x4 2x4 4x4 8x1 1x8 8x2 2x8 16x1 1x16 3x1 5x1 6x1 7x1 9x1 10x1 11x1 12x1 13x1 14x1 15x1 3x2 5x2 6x2 7x2 "
    "1x3 2x3 3x3 4x3 5x3 3x4 1x5 2x5 3x5 1x6 2x6 1x7 2x7 1x9 1x10 1x11 1x12 1x13 1x14 1x15"
)


def _sizes(text: str) -> list[tuple[int, int]]:
    return [(int(rows), int(columns)) for rows, _, columns in (size.partition("x") for size in text.split())]


@functools.cache
def tiles() -> Mapping[int, tuple[int, int]]:
    """Number -> (rows, columns) of a tile of D (``cublasLtMatmulTile_t``)."""
    sizes = dict.fromkeys(_sizes(_FIRST))
    fine, coarse = range(8, _LARGEST + 1, 8), range(64, _LARGEST + 1, 64)
    sizes |= {(rows, columns): None for rows in fine for columns in coarse if rows * columns <= _TALL}
    sizes |= {(rows, columns): None for rows in coarse for columns in fine if rows * columns <= _WIDE}
    return MappingProxyType(dict(enumerate([*sizes, *_sizes(_LAST)], start=1)))


@functools.cache
def clusters() -> Mapping[int, tuple[int, int]]:
    """Number -> (rows, columns) of a cluster of blocks (``cublasLtClusterShape_t``)."""
    return MappingProxyType(dict(enumerate(_sizes(_CLUSTERS), start=2)))
