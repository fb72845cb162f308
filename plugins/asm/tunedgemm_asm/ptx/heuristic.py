"""Choose the solution of an untuned call on Hopper."""

from __future__ import annotations

import attrs
from tunedgemm.plugin import Device, Shape, Solution, scale_order

from tunedgemm_asm.ptx.cost import cost_of
from tunedgemm_asm.ptx.limits import supports, unfit
from tunedgemm_asm.ptx.names import COLUMNS
from tunedgemm_asm.ptx.space import enumerate_stages, enumerate_tiles, is_worthwhile

#: Fewest rows of the weight, and least K, of an untuned product that gets a kernel.
_LEAST = 2048
#: From these rows of x on, the most elements of the weight and the largest K of an untuned fp8
#: product by row. Such products were 1.06 to 1.6 times as fast as `torch._scaled_mm` on an H200 (23
#: November 2026; N and K 2112 to 8192), 0.997 to 1.5 times on an H100 (26 November 2026; N 4096 to
#: 73728). Those beyond the limits were 0.86 to 1.09 times.
_BY_ROW = ((256, 1 << 40, 12288), (512, 160 << 20, 8192), (4096, 1 << 40, 8192))
#: Least and most rows of x of an untuned 16-bit product, and fewest elements of its weight. In bf16
#: on an H100 (26 November 2026; 13 weights of 18 to 340 million elements) they were 1.02 to 1.11
#: times as fast as `F.linear` at M of 4 to 16, 1.005 to 1.10 times at 24 and 32. M = 2 runs the
#: kernel of 8. Smaller weights lost up to 2 % at M = 32; on an H200 one of two lost at M = 64.
_SIXTEEN_BITS = ((2, 16, 16 << 20), (17, 32, 28 << 20))
#: Most rows of x that one tile takes: two would read the weight twice. Guesses of two at M of 16
#: and 32 were 0.92 to 1.01 times as fast as `F.linear` (H100, bf16, K of 12288 and 18944).
_ONE_TILE = 32
#: Most rows of x, fewest elements of the weight, and largest K of an untuned fp8 product by block
#: with M-major scales. On an H100 (26 November 2026; 125 products, M 1 to 8192) such products were
#: 1.02 to 1.9 times as fast as torch's call, but for one of M = 1024 (0.97, between 0.95 and 1.06).
#: K = 25600 at M = 4096 was slower. So were some row-major scales.
_ROWS_BY_BLOCK, _WEIGHT_BY_BLOCK, _K_BY_BLOCK = 8192, 14 << 20, 18432


def heuristic_fallback(libtype: str, shape: Shape, device: Device) -> Solution | None:
    """Return the best guess where such guesses were measured to be faster than torch, else None.

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
    if shape.m <= _ONE_TILE:
        fitting = [tile for tile in fitting if (tile.tile_b if tile.swapped else tile.tile_a) >= shape.m]
    config = min(fitting, key=lambda config: (cost_of(config, 1, shape, max(1, device.cu_num)), config.turns))
    return Solution(libtype, config.name, 1)


def _faster_untuned(shape: Shape) -> bool:
    """Check whether such products were measured to be faster than torch's without tuning."""
    if min(shape.n, shape.k) < _LEAST:
        return False
    weight = shape.n * shape.k
    if shape.op == "a16w16":
        in_class = any(least <= shape.m <= most and weight >= smallest for least, most, smallest in _SIXTEEN_BITS)
        return in_class and shape.outdtype == shape.dtype
    if shape.op == "a8w8":
        limits = [(most, deepest) for least, most, deepest in _BY_ROW if shape.m >= least]
        in_class = bool(limits) and weight <= limits[-1][0] and shape.k <= limits[-1][1]
        return in_class and shape.dtype.startswith("fp8") and shape.scale == "row"
    if shape.op == "a8w8_blockscale":
        measured = shape.m <= _ROWS_BY_BLOCK and weight >= _WEIGHT_BY_BLOCK and shape.k <= _K_BY_BLOCK
        return measured and scale_order(shape) != "row"
    return False
