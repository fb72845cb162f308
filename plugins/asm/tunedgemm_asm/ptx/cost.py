"""Predict the time of a kernel, to order solutions.

The tensor cores of a Hopper SM do 4096 operations in a cycle. The other rates are fitted to 5072
times of 38 products on an H200 under load, 22 and 23 November 2026: 16-bit operands, and fp8 with
scales by row and by block (``benchmarks/cost_fit.py``). What promotion shows by block, or
overlapped, is fitted to 2180 times of 48 products on an H100, 25 and 26 November 2026. The fit
optimizes the order of kernels, so a rate that bounds few kernels, such as that of L2, is not a
measurement. The cost of a launch, equal for all kernels, is part of the other rates. A stage of
8-bit operands has twice the elements at twice the rate, so it takes as long as one of 16 bits.
"""

from __future__ import annotations

import functools
import math

from tunedgemm.plugin import Shape

from tunedgemm_asm.limits import ceil_div
from tunedgemm_asm.ptx.epilogue import BYTES
from tunedgemm_asm.ptx.limits import part_of, rows_of, shared_by, shared_evenly, steps_of, tiles_of
from tunedgemm_asm.ptx.names import ELEMENT_BYTES, SIDE, STEP, STEP_BYTES, STEP_K, KernelConfig
from tunedgemm_asm.ptx.splitk import slot_bytes

_CYCLES_A_US, _OPERATIONS, _SHARED_BYTES = 1375.0, 4096, 112.0
#: Rows of b by which the time of a wgmma grows.
_WGMMA_ROWS = 16
_MEMORY, _L2 = 3.66e6, 19e6  # bytes per microsecond
#: Product whose rates these are. Others take its memory, which bounds all kernels alike: at lower
#: rates more of them tie.
FITTED_ON = "nvidia-h200"
#: Bytes per microsecond that reach one SM.
_SM = 12.5e4
#: Load latency, and split-K fixup of a tile, in microseconds.
_LATENCY, _MEETING = 1.24, 4.5
#: Bytes that a consumer stores in a cycle, with conversion and shuffles, to global memory or
#: panels.
_STORED = 12.3
#: Cycles to fence, synchronize and wait, each time that a consumer has filled all its panel
#: buffers.
_GIVING = 560.0
#: Cycles from the last wgmma of a stage to its accumulators, and from the last addition to the next
#: wgmma.
_TURN = 117.0
#: Fraction of promotion cycles not overlapped with another consumer's MMAs.
_SHOWN_BY_ROW, _SHOWN_BY_BLOCK = 0.2, 0.8
#: Fraction of a turn not overlapped with the MMAs of the next portion.
_SHOWN_OVERLAPPED = 0.7
#: Visible cycles of a load or product of block scales.
_FACTOR = 4.0
#: Slowdown of the products of a cluster, whose CTAs wait for each other to release a stage.
_WAITED = 0.0165
#: CTAs of a cluster -> slowdown of stream-K steps: neighbouring CTAs are at different places along
#: K and share no loads in L2. Medians of 132 pairs on an H200, 23 November 2026; by block of 432
#: pairs on an H100, 26 November 2026.
_SCATTERED, _SCATTERED_BY_BLOCK = {1: 0.44, 2: 0.17}, {1: 0.64, 2: 0.48}
#: Order of the norm that combines bounds: bounds of similar size add up in part, because their
#: bursts do not overlap fully. The norm also orders kernels that share one bound, such as memory.
_TOGETHER = 12.0


def bound(*times: float) -> float:
    """Return the time of concurrent work from the times of its parts."""
    return float(sum(time**_TOGETHER for time in times) ** (1 / _TOGETHER))


def step_cycles(config: KernelConfig, tensor: float = 1.0) -> float:
    """Return the cycles of a stage: tensor core operations, or reading both operands from shared
    memory.
    """
    rows = config.portion if config.overlapped else config.tile_b
    return config.sharing * config.blocks * (config.tile_b // rows) * (STEP // STEP_K) * _wgmma_cycles(rows, tensor)


def _wgmma_cycles(rows: int, tensor: float) -> float:
    """Return the cycles of a wgmma of 64 rows of a and these rows of b, 32 bytes deep."""
    multiplied = 2 * SIDE * ceil_div(rows, _WGMMA_ROWS) * _WGMMA_ROWS * STEP_K / (_OPERATIONS * tensor)
    return max(multiplied, (SIDE + rows) * 2 * STEP_K / _SHARED_BYTES)


def scale_operations(config: KernelConfig) -> float:
    """Return a thread's loads and products of block scales in a stage.

    A thread has two rows of a and two of 8 rows of b. With swapped operands each row of b has its
    scale; else each span of the weight's rows has one, for both rows of x.
    """
    return config.tile_b / 4 * 1.5 if config.swapped else 3.0 * config.spans + 2


def promoted_cycles(config: KernelConfig, by_block: bool, resident: int, tensor: float = 1.0) -> float:
    """Return the cycles of a stage with promotion, part of which other consumers of the SM hide.

    The CUDA cores of an SM add 128 accumulators in a cycle, one for each thread of a consumer.
    """
    factors = _FACTOR * scale_operations(config) if by_block else 0.0
    if config.overlapped:
        return max(step_cycles(config, tensor), config.sharing * config.accumulators) + _SHOWN_OVERLAPPED * _TURN + factors
    shown = 1.0 if config.consumers * resident == 1 else _SHOWN_BY_BLOCK if by_block else _SHOWN_BY_ROW
    return step_cycles(config, tensor) + shown * (config.accumulators + len(config.portions) * _TURN + factors)


@functools.lru_cache(maxsize=4096)
def _step_us(config: KernelConfig, by_block: bool, resident: int, tensor: float) -> float:
    """Return the microseconds of a stage. All CTAs of the SM load while other stages are in flight."""
    loaded = max(_LATENCY / (config.stages * resident), config.stage_bytes / _SM)
    cycles = promoted_cycles(config, by_block, resident, tensor) if config.promoted else step_cycles(config, tensor)
    cycles *= 1 + _WAITED * (config.cluster - 1)
    return bound(cycles / _CYCLES_A_US, loaded)


def cost_of(config: KernelConfig, splits: int, shape: Shape, multiprocessors: int, tensor: float = 1.0) -> float:
    """Return the predicted microseconds of a solution.

    *tensor* is the rate of an SM's tensor cores over that of the product fitted on.
    """
    added = splits * config.folded  # parts that a consumer adds in registers
    splits = shared_by(config, splits)
    rows_a, rows_b = rows_of(config, shape)
    all_steps, resident, steps, tiles = _work(config, splits, shape, multiprocessors)
    step = _step_us(config, shape.scale == "block", resident, tensor)
    out = BYTES[shape.outdtype]
    tile = config.tile_a * config.tile_b * out / _STORED / _CYCLES_A_US / config.sharing
    tile += _GIVING * ceil_div(config.all_panels, config.panels) / _CYCLES_A_US if config.panels else 0.0
    tile += added * (config.accumulators + _TURN) / _CYCLES_A_US
    multiplied = steps * step + tiles * tile + _LATENCY
    if config.turns:  # a tile is stored while the next is multiplied: each consumer has twice the time for its own
        multiplied -= (tiles - 1) * min(tile, (steps / tiles * step + tile) / 2)
    from_l2 = all_steps * (config.tile_a + config.tile_b / config.cluster) * STEP_BYTES / _L2
    from_memory = (ELEMENT_BYTES[shape.dtype] * shape.k * (rows_a + rows_b) + out * shape.m * shape.n) / _MEMORY
    met = _met(config, splits, shape, multiprocessors)
    partial = config.sharing * slot_bytes(config.accumulators)
    # All partials of a split tile are stored, and loaded by one SM. Stream-K has few, which its
    # measured slowdown includes.
    at_one = 0 if config.stream else splits
    parts = 2 * partial * (met / _L2 + at_one / _SM) + _MEETING if met else 0.0
    return bound(multiplied, from_l2, from_memory) + parts


def _work(config: KernelConfig, splits: int, shape: Shape, multiprocessors: int) -> tuple[int, int, float, int]:
    """Return the steps of all CTAs, CTAs per SM, and steps and tile ends of the busiest SM.

    Steps of stream-K ranges are weighted by their slowdown.
    """
    tiles = tiles_of(config, shape)
    if config.stream:
        shares, whole = shared_evenly(config, shape, multiprocessors), steps_of(shape)
        resident = min(config.resident, ceil_div(shares.clusters * config.cluster, multiprocessors))
        scattered = _SCATTERED_BY_BLOCK if shape.scale == "block" else _SCATTERED
        steps = shares.rounds * whole + shares.length * (1 + scattered[config.cluster])
        ends = shares.rounds + ceil_div(shares.length, whole)
        return tiles * whole, resident, steps * resident, ends * resident
    items, resident_ctas, part = tiles * splits, multiprocessors * config.resident, part_of(splits, shape)
    resident = min(config.resident, ceil_div(items, multiprocessors))
    rounds = ceil_div(items, resident_ctas) * resident
    return items * part, resident, rounds * part, rounds


def _met(config: KernelConfig, splits: int, shape: Shape, multiprocessors: int) -> int:
    """Return the partials that CTAs store and load again; with stream-K, one for each range end in
    a tile.
    """
    if not config.stream:
        return tiles_of(config, shape) * splits if splits > 1 else 0
    shares, steps = shared_evenly(config, shape, multiprocessors), steps_of(shape)
    ends = (shares.tiles * steps - 1) // shares.length
    return config.cluster * (ends - ends // (steps // math.gcd(shares.length, steps)))
