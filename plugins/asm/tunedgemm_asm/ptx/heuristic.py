"""Choose the solution of an untuned call on Hopper."""

from __future__ import annotations

import attrs
from tunedgemm.plugin import Device, Shape, Solution

from tunedgemm_asm.ptx.cost import cost_of
from tunedgemm_asm.ptx.limits import supports, unfit
from tunedgemm_asm.ptx.names import COLUMNS
from tunedgemm_asm.ptx.space import enumerate_stages, enumerate_tiles, is_worthwhile

#: Fewest rows of x and smallest weight of an untuned fp8 product by row that gets a kernel. Each of
#: those timed on an H200 (23 November 2026; M 256 to 4096, N and K 2112 to 8192) was 1.06 to 1.6
#: times as fast as `torch._scaled_mm`.
_UNTUNED_ROWS, _UNTUNED_WEIGHT = 256, 2048


def heuristic_fallback(libtype: str, shape: Shape, device: Device) -> Solution | None:
    """Return the best guess for weights in columns and for large fp8 products by row, else None.

    torch would reorder weights in columns in each call. An fp8 guess is promoted, as exact as
    torch. The guess has one split and no cluster, so that calls of all M share few kernels. It
    takes about a millisecond, once for each M.
    """
    if not supports(shape, device) or (shape.layout != COLUMNS and not _faster_untuned(shape)):
        return None
    tiles = [
        attrs.evolve(tile, stages=stages[0])
        for tile in enumerate_tiles(shape, shape.dtype.startswith("fp8"))
        if tile.overlapped <= tile.staged and (stages := enumerate_stages(tile))  # others that overlap have not been timed
    ]
    fitting = [tile for tile in tiles if not unfit(tile, 1, shape) and is_worthwhile(tile, shape, device)]
    config = min(fitting, key=lambda config: (cost_of(config, 1, shape, max(1, device.cu_num)), config.turns))
    return Solution(libtype, config.name, 1)


def _faster_untuned(shape: Shape) -> bool:
    """Check whether such products were measured to be faster than torch's without tuning."""
    if shape.op != "a8w8" or not shape.dtype.startswith("fp8") or shape.scale != "row":
        return False
    return shape.m >= _UNTUNED_ROWS and min(shape.n, shape.k) >= _UNTUNED_WEIGHT
