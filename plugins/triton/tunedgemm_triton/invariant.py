"""Choose the solution of an untuned call in batch-invariant mode: one order of sums for all M."""

from __future__ import annotations

import functools

import attrs
from tunedgemm.plugin import Device, Shape, Solution
from tunedgemm.tools.launching import ARCHITECTURES

from tunedgemm_triton.families import DENSE, family_of
from tunedgemm_triton.limits import width_of
from tunedgemm_triton.names import Gemm
from tunedgemm_triton.resources import fits
from tunedgemm_triton.sums import order_of

#: Bytes of K of a step: the same for every M, since on AMD the order of sums depends on it.
_STEP = 128
_ANY = 1 << 62
#: Tiles by rows of x: most rows, block_m, block_n, warps, stages, transposed. Those of wgmma and
#: tcgen05 have 64 rows of one operand at least, as smaller ones are multiplied by mma.
_SHARED = (
    (16, 16, 64, 4, 6, True), (32, 32, 64, 4, 6, True), (64, 64, 64, 4, 6, False), (256, 64, 128, 4, 4, False),
    (_ANY, 128, 128, 8, 4, False),
)  # fmt: skip
_TILES = {
    "wgmma": _SHARED,
    "tcgen05": _SHARED,
    "mma": ((16, 16, 64, 4, 5, False), (32, 32, 64, 4, 4, False), (64, 64, 64, 4, 4, False), (_ANY, 128, 128, 8, 3, False)),
    "mfma": ((32, 32, 64, 4, 2, False), (64, 64, 64, 4, 2, False), (_ANY, 128, 128, 4, 2, False)),
    "wmma": ((32, 32, 64, 4, 2, False), (64, 64, 64, 4, 2, False), (_ANY, 128, 64, 4, 2, False)),
}
#: Rows of x that stand for any larger number.
_LARGE = 1 << 20
#: Side of AMD's matrix instruction, where there are several.
_SIDE = 16


def invariant_fallback(shape: Shape, device: Device) -> Solution | None:
    """Return the kernel of the weight's order of sums for this M; None if some M would have none."""
    if family_of(shape.op) is not DENSE:
        return None
    kernels = _kernels(attrs.evolve(shape, m=1), device)
    kernel = next((kernel for rows, kernel in kernels if shape.m <= rows), None)
    return DENSE.solution_of(kernel, 1, shape, device) if kernel else None


@functools.lru_cache(maxsize=4096)
def _kernels(weight: Shape, device: Device) -> tuple[tuple[int, Gemm], ...]:
    """Return the kernels of a weight by most rows of x, without splits; none if some rows lack one.

    A tile that does not fit has fewer stages, or makes way for the next smaller one.
    """
    found: list[tuple[int, Gemm]] = []
    tiles = _TILES[ARCHITECTURES[device.gfx].matrix]
    for index, (rows, *_) in enumerate(tiles):
        shape = attrs.evolve(weight, m=min(rows, _LARGE))
        smaller = (kernel for tile in tiles[index::-1] for kernel in _with_stages(tile, shape, device))
        kernel = next((kernel for kernel in smaller if fits(kernel, 1, shape, device)), None)
        if kernel is None or not order_of(kernel, 1, shape, device):
            return ()
        found.append((rows, kernel))
    return tuple(found)


def _with_stages(tile: tuple[int, ...], shape: Shape, device: Device) -> list[Gemm]:
    """Return the kernel of a tile with its stages, then with fewer."""
    _, block_m, block_n, warps, stages, swap = tile
    side = _SIDE if ARCHITECTURES[device.gfx].matrix == "mfma" else 0
    block_k = _STEP // width_of(shape.dtype)
    group = 8 if shape.m > block_m else 1
    return [Gemm(block_m, block_n, block_k, group, warps, each, bool(swap), side) for each in range(stages, 0, -1)]
