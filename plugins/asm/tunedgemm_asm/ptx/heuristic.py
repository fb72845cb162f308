"""Choose the solution of an untuned call on Hopper."""

from __future__ import annotations

import attrs
from tunedgemm.plugin import Device, Shape, Solution
from tunedgemm.tools.launching import may_guess, scale_order

from tunedgemm_asm.ptx.cost import cost_of
from tunedgemm_asm.ptx.limits import unfit
from tunedgemm_asm.ptx.names import COLUMNS
from tunedgemm_asm.ptx.space import enumerate_stages, enumerate_tiles, is_worthwhile

#: Fewest rows of the weight, and least K, of an untuned product that gets a kernel, by op.
_LEAST = {"a16w16": (2048, 2048), "a8w8": (2048, 2048), "a8w8_blockscale": (512, 256)}
_MI = 1 << 20
_ANY = 1 << 62
_H100 = "nvidia-h100"


@attrs.frozen
class Measured:
    """Products whose kernels were measured to be faster than torch's call.

    Attributes:
        rows: rows of x.
        weight: elements of the weight.
        most_k, most_n: largest K and N.
        device: beginning of the slugs of the devices; empty for all.
    """

    rows: range
    weight: range
    most_k: int = _ANY
    most_n: int = _ANY
    device: str = ""

    def has(self, shape: Shape, device: Device) -> bool:
        """Check whether a product belongs to them."""
        fits = shape.m in self.rows and shape.n * shape.k in self.weight and device.name.startswith(self.device)
        return fits and shape.k <= self.most_k and shape.n <= self.most_n


#: Op -> untuned products that get a kernel. Gains are over torch's call, on an H100 (26 November
#: 2026) where no other device is named.
#:
#: bf16, 13 weights of 18 to 340 million elements: 1.02 to 1.11 at M of 4 to 16, 1.005 to 1.10 at 24
#: and 32. M = 2 runs the kernel of 8. Weights of 12 to 16 million elements: 1.04 to 1.33 at 2 and
#: 4, up to 2 % lost at 32. M of 48 to 128, 45 products from 28 Mi elements on: 1.004 to 1.18, but
#: one of 38 Mi lost 1 % at 96, and a smaller one 2 % at 64. M = 256, seven of 13 to 50 Mi elements:
#: 1.016 to 1.13; of nine larger ones three lost 10 %. M = 192, nine of them: 0.998 to 1.17.
#: An H200 reads 1.4 times as fast, so uneven shares of its SMs lose: of 65 products of M up to 32
#: and larger N or weight, 45 lost, up to 8 %. The 32 others were at 0.992 to 1.23.
#:
#: fp8 by row, 34 products of M up to 32, 17 to 262 million elements: 1.03 to 1.63. Smaller weights
#: of the same K take torch as long, and these kernels less. M from 256, N 4096 to 73728: 0.997 to
#: 1.5; on an H200 (23 November; N and K 2112 to 8192) 1.06 to 1.6. Those of larger K or weight:
#: 0.86 to 1.09.
#:
#: fp8 by block with M-major scales, 125 products: 1.02 to 1.9, but for one of M = 1024 (0.97,
#: between 0.95 and 1.06). K = 25600 at M = 4096 was slower. So were some row-major scales. Layers
#: of three models from 1.75 Mi elements on, 159 products: 1.007 to 2.5; on an H200 (28 November
#: 2026) 24 products: 1.04 to 2.4.
_FASTER = {
    "a16w16": (
        Measured(range(2, 9), range(10 * _MI, _ANY), device=_H100),
        Measured(range(9, 17), range(16 * _MI, _ANY), device=_H100),
        Measured(range(17, 65), range(28 * _MI, _ANY), device=_H100),
        Measured(range(65, 129), range(40 * _MI, _ANY), device=_H100),
        Measured(range(129, 257), range(13 * _MI, 56 * _MI), device=_H100),
        Measured(range(2, 9), range(10 * _MI, _ANY), 25600, 7168),
        Measured(range(9, 17), range(16 * _MI, _ANY), 25600, 7168),
        Measured(range(17, 33), range(28 * _MI, 112 * _MI), most_n=5120),
        Measured(range(256, 257), range(13 * _MI, 56 * _MI), most_n=5120),
    ),
    "a8w8": (
        Measured(range(1, 33), range(4 * _MI, _ANY), 25600),
        Measured(range(256, 512), range(_ANY), 12288),
        Measured(range(512, 4096), range(160 * _MI), 8192),
        Measured(range(4096, _ANY), range(_ANY), 8192),
    ),
    "a8w8_blockscale": (Measured(range(1, 8193), range(_MI, _ANY), 18432),),
}
#: Most rows of x that one tile takes: two would read the weight twice. Guesses of two at M of 16
#: and 32 were 0.92 to 1.01 times as fast as `F.linear` (H100, bf16, K of 12288 and 18944).
_ONE_TILE = 32
#: Most rows of the weight in such a tile in 16 bits where an SM gets more of them than it holds at
#: once: its last one takes less time. At N = 37888, tiles of 128 rows were 0.955 to 0.98 times as
#: fast as F.linear (H100).
_NARROW, _RESIDENT = 64, 2
#: Below this K a transposed tile of two consumers spends its time on the store. By block at M = 64,
#: N = 32768, K = 512 it lost 10 % to torch, and others were 1.07 to 1.15 times as fast (H100).
_SHORT_K = 1024


def heuristic_fallback(libtype: str, shape: Shape, device: Device) -> Solution | None:
    """Return the best guess where such guesses were measured to be faster than torch, else None.

    torch would reorder weights in columns in each call. An fp8 guess is promoted, as exact as
    torch. The guess has one split and no cluster, so that calls of all M share few kernels. It
    takes about a millisecond, once for each M.
    """
    if shape.layout != COLUMNS and not _faster_untuned(shape, device):
        return None
    tiles = [
        attrs.evolve(tile, stages=stages[0])
        for tile in enumerate_tiles(shape, shape.dtype.startswith("fp8"))
        if tile.overlapped <= tile.staged and (stages := enumerate_stages(tile))  # others that overlap have not been timed
    ]
    fitting = [tile for tile in tiles if not unfit(tile, 1, shape) and is_worthwhile(tile, shape, device)]
    if shape.m <= _ONE_TILE:
        several_rounds = shape.op == "a16w16" and shape.n > _NARROW * _RESIDENT * device.cu_num
        fitting = [tile for tile in fitting if tile.tile_m >= shape.m and (tile.tile_n <= _NARROW or not several_rounds)]
    elif shape.k < _SHORT_K:
        fitting = [tile for tile in fitting if not (tile.swapped and tile.consumers > 1)]
    config = min(fitting, key=lambda config: (cost_of(config, 1, shape, max(1, device.cu_num)), config.turns))
    return Solution(libtype, config.name, 1)


def _faster_untuned(shape: Shape, device: Device) -> bool:
    """Check whether such products were measured to be faster than torch's without tuning."""
    rows, depth = _LEAST.get(shape.op, (_ANY, _ANY))
    if not may_guess(device) or shape.n < rows or shape.k < depth or not any(each.has(shape, device) for each in _FASTER[shape.op]):
        return False
    if shape.op == "a16w16":
        return shape.outdtype == shape.dtype
    if shape.op == "a8w8":
        return shape.dtype.startswith("fp8") and shape.scale == "row"
    return shape.m == 1 or scale_order(shape) != "row"  # the scales of one row are in every order
