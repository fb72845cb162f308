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
#: Fewest rows of x of an untuned fp8 product by row that gets a kernel. Each of those timed on an
#: H200 (23 November 2026; M 256 to 4096, N and K 2112 to 8192) was 1.06 to 1.6 times as fast as
#: `torch._scaled_mm`.
_ROWS_BY_ROW = 256
#: Least and most rows of x of an untuned 16-bit product, and fewest elements of its weight. Timed
#: in bf16 on an H100 (26 November 2026; weights of 17 to 778 million elements): 30 products at M of
#: 8 and 16 were 0.996 to 1.20 times as fast as `F.linear`, 10 at M = 32 1.03 to 1.18 times. Smaller
#: weights lost up to 2 % at M = 32, and on an H200 one of two lost at M = 64. M of 3 to 7 run a
#: kernel of 8.
_SIXTEEN_BITS = ((3, 16, 16 << 20), (17, 32, 28 << 20))
#: Most rows of x, fewest elements of the weight, and largest K of an untuned fp8 product by block
#: with M-major scales. Timed on an H100 (26 November 2026; 44 products, M 1 to 8192): 1.04 to 1.73
#: times as fast as torch's call. K = 25600 at M = 4096 was slower. So were some row-major scales.
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
        return shape.dtype.startswith("fp8") and shape.scale == "row" and shape.m >= _ROWS_BY_ROW
    if shape.op == "a8w8_blockscale":
        measured = shape.m <= _ROWS_BY_BLOCK and weight >= _WEIGHT_BY_BLOCK and shape.k <= _K_BY_BLOCK
        return measured and scale_order(shape) != "row"
    return False
