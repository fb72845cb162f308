"""Choose the solution of an untuned call on Hopper."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import attrs
from tunedgemm.plugin import Device, Shape, Solution
from tunedgemm.tools.launching import may_guess, scale_order, stand_ins, unit_peak_over

from tunedgemm_asm.limits import ceil_div
from tunedgemm_asm.ptx.cost import FITTED_ON, cost_of
from tunedgemm_asm.ptx.limits import MOST_SIZE, MOST_SPLITS, tiles_of, unfit
from tunedgemm_asm.ptx.names import COLUMNS, SCALE_BLOCK, KernelConfig
from tunedgemm_asm.ptx.space import (
    MOST_SWAPPED,
    Candidate,
    Tiles,
    enumerate_stages,
    enumerate_tiles,
    is_worthwhile,
    resident_ctas,
    with_panels,
)
from tunedgemm_asm.ptx.sums import solution_of

_MI = 1 << 20
_ANY = 1 << 62
_H100, _H200 = "nvidia-h100", "nvidia-h200"


@attrs.frozen
class Measured:
    """Products whose kernels were measured to be faster than torch's call.

    Attributes:
        rows: rows of x.
        weight: elements of the weight.
        most_k, most_n: largest K and N.
        least_k: smallest K.
        device: beginning of the slugs of the devices; empty for all.
    """

    rows: range
    weight: range = range(_ANY)
    most_k: int = _ANY
    most_n: int = _ANY
    least_k: int = 0
    device: str = ""

    def has(self, shape: Shape, device: Device) -> bool:
        """Check whether a product belongs to them."""
        fits = shape.m in self.rows and shape.n * shape.k in self.weight and device.name.startswith(self.device)
        return fits and self.least_k <= shape.k <= self.most_k and shape.n <= self.most_n


#: Op -> untuned products that get a kernel, by the gain over torch's call on an H100 (26 November
#: 2026) and an H200 (26 and 28 November 2026). Kernels that split K, and sizes drawn at random,
#: were timed on the H200 alone.
#:
#: bf16, M of 2 to 32, N up to 7168: 1.016 to 1.2 on the H100, 0.979 to 1.34 on the H200. Wider
#: weights leave the last round of tiles uneven, and an H200, which reads 1.4 times as fast, loses
#: up to 8 %. Weights up to 2.5 Mi elements at M of 33 to 256: 1.06 to 1.14, but 0.97 for one at
#: M = 256, K = 256. H100, M of 48 to 128, 45 products from 28 Mi elements on: 1.004 to 1.18, but
#: one of 38 Mi lost 1 % at 96, and a smaller one 2 % at 64. M = 256, seven of 13 to 50 Mi elements:
#: 1.016 to 1.13; of nine larger ones three lost 10 %. M = 192, nine of them: 0.998 to 1.17.
#:
#: fp8 by row, up to 64 rows, 130 products of every size: 1.03 to 2.3 with one split. More rows with
#: K from 1024: 0.99 to 5.8. On an H100 larger K or weight at M from 256 lost up to 14 %; two of
#: such K and N up to 5120 gain 1.23 and 1.45 at M = 256 on the H200.
#:
#: fp8 by block with M-major scales, every size: 1.0 to 9.8 in 190 products on the H200, and 1.007
#: to 2.5 in 159 on the H100. Of 139 drawn by chance on the H200 two lost 1 and 3 %. More than 8192
#: rows, which engines run in prefill, were not timed: tensor cores bound both. With row-major
#: scales, M of 256 to 4096, N and K from 3584: 1.02 to 1.18 in nine products on the H100, 1.15 to
#: 1.18 in four on the H200; x of 32 Mi elements: 0.98 to 1.0.
_FASTER = {
    "a16w16": (
        Measured(range(1, 2), range(10 * _MI), most_n=8192),
        Measured(range(2, 33), most_n=7168),
        Measured(range(33, 129), range(5 * _MI // 2), 2048, 4096),
        Measured(range(129, 257), range(5 * _MI // 2), 2048, 4096, 512),
        Measured(range(2, 9), range(10 * _MI, _ANY), device=_H100),
        Measured(range(9, 17), range(16 * _MI, _ANY), device=_H100),
        Measured(range(17, 65), range(28 * _MI, _ANY), device=_H100),
        Measured(range(65, 129), range(40 * _MI, _ANY), device=_H100),
        Measured(range(129, 257), range(13 * _MI, 56 * _MI), device=_H100),
        Measured(range(256, 257), range(13 * _MI, 56 * _MI), most_n=5120),
    ),
    "a8w8": (
        Measured(range(1, 65)),
        Measured(range(65, 256), least_k=1024),
        Measured(range(256, 512), most_k=12288, least_k=1024),
        Measured(range(256, 257), most_n=5120, least_k=1024, device=_H200),
        Measured(range(512, 4096), range(160 * _MI), 8192, least_k=1024),
        Measured(range(4096, _ANY), most_k=8192, least_k=1024),
    ),
    "a8w8_blockscale": (Measured(range(1, 16385)),),
}
#: 16-bit weights of few rows and large K, for which torch's split kernels are as fast; with up to
#: `_READ_ALONE` rows of x and `_NARROW_N` of the weight skinny's are faster.
_NARROW_N, _NARROW_K, _FEW_N, _LARGE_K, _READ_ALONE = 1024, 1792, 2048, 4096, 4
#: Most rows of x that one tile takes: two would read the weight twice. Guesses of two at M of 16
#: and 32 were 0.92 to 1.01 times as fast as `F.linear` (H100, bf16, K of 12288 and 18944).
_ONE_TILE = 32
#: Most rows of the weight in such a tile in 16 bits where an SM gets more of them than it holds at
#: once: its last one takes less time. At N = 37888, tiles of 128 rows were 0.955 to 0.98 times as
#: fast as F.linear (H100).
_NARROW, _RESIDENT = 64, 2
#: Below this K a transposed tile of two consumers spends its time on the store. By block at M = 64,
#: N = 32768, K = 512 it lost 10 % to torch, and others were 1.07 to 1.15 times as fast (H100).
#: One that overlaps was always slower than the best guess among others, by 5 to 60 % (by block at
#: M = 64 and 128, 62 products, H100 and H200).
_SHORT_K = 1024
#: By block, fewest rows and most elements of x whose scales may be row-major.
_ROW_MAJOR, _ROW_MAJOR_X = 256, 32 * _MI
#: Rows of x up to which, and the multiples to which, they are rounded up before a guess is judged.
#: A step of 128 at more than 1024 rows costs up to 0.05 % of the predicted time in the mean, as
#: most tiles have 128; one of 256 costs up to 1.2 %, and 0.4 % beyond 8192 (11 weights by block).
_STEPS, _MANY_STEP = ((256, 8), (1024, 64), (8192, 128)), 256
#: Splits of a guess, tried where CTAs would be idle: a subset, since each takes 10 us to judge.
_SPLITS = tuple(splits for splits in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16) if splits <= MOST_SPLITS)
#: Tiles of an fp8 guess, in finer steps than a list's, whose neighbours the tuner tries. Where one
#: of them was predicted to be the best, it was 1.015 times as fast as the best other, 0.98 to 1.07
#: (16 products, H100 and H200).
_FINE: Tiles = {
    (64, 1): range(16, 257, 16),
    (128, 1): (64, 80, 96),
    (128, 2): range(64, 257, 16),
    (256, 2): (64, 80, 96, 112, 128),
}
#: By row, most rows of x up to which only kernels that overlap are guesses: 1.03 to 1.12 times as
#: fast as the guesses among others on an H200 (8 products), 1.04 on an H100 (0.95 to 1.4, 57). And
#: most rows of x and of the weight: at M of 128 and 256 they were 0.99 to 1.17 times as fast (12
#: products on an H200), but wider weights were not timed.
_OVERLAPPED, _MORE_OVERLAPPED, _OVERLAPPED_N = 64, 256, 10240
#: By block, rows of x above which only kernels that overlap are guesses. Time with outputs that TMA
#: stores, over the predicted one without. Below, rows of x and of the weight -> time over the
#: predicted one. Both hold from a second round on. They are fitted to 163 products (H100 and H200).
#: Fitted without one weight in eight at a time, guesses reach 0.988 of the speed of the best such
#: kernel in the mean, 0.875 at least.
_LARGE, _STORED_BY_TMA = 256, 0.95
_TIMES = {(128, 160): 0.98, (128, 192): 0.94, (128, 224): 0.87, (128, 256): 0.9, (256, 128): 1.05}


def heuristic_fallback(libtype: str, shape: Shape, device: Device) -> Solution | None:
    """Return the best guess where such guesses were measured to be faster than torch, else None.

    torch would reorder weights in columns in each call. An fp8 guess is promoted, as exact as
    torch. It has no cluster and one number of stages, so that calls of all M share few kernels.
    """
    if shape.layout != COLUMNS and not _faster_untuned(shape, device):
        return None
    guess = guess_of(rounded(shape, _STEPS, _MANY_STEP), device)
    return solution_of(libtype, *guess, shape) if guess else None


def rounded(shape: Shape, steps: Sequence[tuple[int, int]], beyond: int) -> Shape:
    """Round the rows of x up, so that calls of many M share a guess.

    Args:
        shape: the shape.
        steps: rows up to which, and the multiples to which, ascending.
        beyond: the multiple for more rows.
    """
    step = next((step for rows, step in steps if shape.m <= rows), beyond)
    return attrs.evolve(shape, m=min(ceil_div(shape.m, step) * step, MOST_SIZE))


@functools.lru_cache(maxsize=4096)
def guess_of(shape: Shape, device: Device, only: int = 0) -> Candidate | None:
    """Return the kernel and splits of the least predicted time; takes about a millisecond.

    *only* is the number of splits; 0 leaves it free. None if each has too many tiles.
    """
    few = shape.m <= (_MORE_OVERLAPPED if shape.n <= _OVERLAPPED_N else _OVERLAPPED)
    like = attrs.evolve(shape, m=min(shape.m, MOST_SWAPPED + 1), n=1, k=1)
    tiles = _tiles(like, few if shape.scale == "row" else _is_large(shape))
    fitting = [tile for tile in tiles if not unfit(tile, 1, shape) and is_worthwhile(tile, shape, device)]
    if shape.m <= _ONE_TILE:
        several_rounds = shape.op == "a16w16" and shape.n > _NARROW * _RESIDENT * device.cu_num
        fitting = [tile for tile in fitting if tile.tile_m >= shape.m and (tile.tile_n <= _NARROW or not several_rounds)]
    else:
        fitting = [tile for tile in fitting if not (tile.swapped and tile.consumers > 1 and (shape.k < _SHORT_K or tile.overlapped))]
    configs = fitting + _large(fitting, shape, device)
    guesses = ((config, splits) for config in configs for splits in _splits(config, shape, device, only))
    return min(guesses, key=lambda guess: (predicted_us(*guess, shape, device), guess[0].turns), default=None)


@functools.lru_cache(maxsize=256)
def _tiles(like: Shape, overlapped: bool) -> tuple[KernelConfig, ...]:
    """Return the tiles of a guess, each with its most stages; equal for all weights and for many
    rows of x.
    """
    fp8 = like.dtype.startswith("fp8")
    tiles = enumerate_tiles(like, fp8, _FINE if fp8 else None)
    asked = (tile for tile in tiles if (tile.overlapped >= tile.promoted if overlapped else tile.overlapped <= tile.staged))
    return tuple(staged for tile in asked if (staged := _with_most_stages(tile)) is not None)


@functools.lru_cache(maxsize=1024)
def _with_most_stages(tile: KernelConfig) -> KernelConfig | None:
    """Return the tile with its most stages; None if none fit."""
    stages = enumerate_stages(tile)
    return attrs.evolve(tile, stages=stages[0]) if stages else None


def _is_large(shape: Shape) -> bool:
    """Check for many rows of x by block."""
    return shape.scale == "block" and shape.m > _LARGE


def _large(tiles: list[KernelConfig], shape: Shape, device: Device) -> list[KernelConfig]:
    """Return the tiles of two consumers with outputs that TMA stores; none for a single round."""
    if not _is_large(shape):
        return []
    large = [other for tile in tiles if tile.consumers > 1 for other in _with_panels(tile)]
    return [tile for tile in large if not unfit(tile, 1, shape) and tiles_of(tile, shape) > device.cu_num]


#: Configurations with and without TMA stores, which take longer to make than to judge.
_with_panels = functools.lru_cache(maxsize=1024)(with_panels)
_direct = functools.lru_cache(maxsize=1024)(functools.partial(attrs.evolve, panels=0))


def predicted_us(config: KernelConfig, splits: int, shape: Shape, device: Device) -> float:
    """Return the predicted microseconds of a guess."""
    us = cost_of(_direct(config), splits, shape, max(1, device.cu_num), unit_peak_over(device, FITTED_ON))
    if _is_large(shape) and tiles_of(config, shape) > device.cu_num:
        us *= _TIMES.get((config.tile_m, config.tile_n), 1.0)
    return us * (_STORED_BY_TMA if config.panels else 1.0)


def _splits(config: KernelConfig, shape: Shape, device: Device, only: int) -> list[int]:
    """Return the splits of K worth judging: up to twice as many CTAs as run at once, or only a given
    number.
    """
    if only:
        return [] if unfit(config, only, shape) else [only]
    most = 2 * (resident_ctas(config, device) // tiles_of(config, shape))
    return [1, *(splits for splits in _SPLITS[1:] if splits <= most and not unfit(config, splits, shape))]  # one is known to fit


def _faster_untuned(shape: Shape, device: Device) -> bool:
    """Check whether such products are expected to be faster than torch's without tuning."""
    places = ((shape, device), *stand_ins(shape, device))
    if not may_guess(device) or not all(any(each.has(*place) for each in _FASTER.get(shape.op, ())) for place in places):
        return False
    if shape.op == "a16w16":
        deep = shape.n < _FEW_N and shape.k > _LARGE_K
        read_alone = shape.m <= _READ_ALONE and shape.n <= _NARROW_N and shape.k >= _NARROW_K
        return shape.outdtype == shape.dtype and not deep and not read_alone
    if shape.op == "a8w8":
        return shape.dtype.startswith("fp8") and shape.scale == "row"
    # Scales of one row of x, or of one block of K, are in every order.
    many = shape.m >= _ROW_MAJOR and shape.m * shape.k < _ROW_MAJOR_X
    return shape.m == 1 or many or shape.k <= SCALE_BLOCK or scale_order(shape) != "row"
