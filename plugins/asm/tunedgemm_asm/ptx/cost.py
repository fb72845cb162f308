"""What a solution should take, to order a list by.

An SM of Hopper does 4096 operations of matrix instructions in a cycle. The other rates are fitted to 5072 times of 38 products on an H200
under load, 22 and 23 November 2026: of 16-bit operands, and of fp8 with scales by row and by block (``benchmarks/asm_fit.py``). They are
what orders kernels best: one that bounds few of them, as that of L2, is no fact, and what a launch costs all alike is in the others.
Of 8-bit operands a stage has twice the elements, multiplied at twice the rate: it takes as long as one of 16 bits.
"""

from __future__ import annotations

import math

from tunedgemm.plugin import Shape

from tunedgemm_asm.limits import ceil_div
from tunedgemm_asm.ptx.epilogue import BYTES
from tunedgemm_asm.ptx.limits import part_of, rows_of, shared_evenly, steps_of, tiles_of
from tunedgemm_asm.ptx.names import ELEMENT_BYTES, SIDE, STEP, STEP_BYTES, STEP_K, KernelConfig
from tunedgemm_asm.ptx.splitk import slot_bytes

_CYCLES_A_US, _OPERATIONS, _SHARED_BYTES = 1375.0, 4096, 112.0
_MEMORY, _L2 = 3.66e6, 19e6  # bytes in a microsecond
#: Bytes that one SM gets in a microsecond.
_SM = 12.5e4
#: Microseconds from a load to its arrival, and of the end of a tile that splits K.
_LATENCY, _MEETING = 1.24, 4.5
#: Bytes that a consumer stores in a cycle, its conversions and exchanges included, to global memory or to panels.
_STORED = 12.3
#: Cycles to fence panels, to meet and to wait, each time that a consumer has written to all its places.
_GIVING = 560.0
#: Cycles from a consumer's last product of a stage to its accumulators, and from the last of those that it adds to its next product.
_TURN = 117.0
#: The share of these cycles, and of those of the additions, that shows although another consumer multiplies meanwhile; by block there
#: are scales to load, and more than additions to do.
_SHOWN_BY_ROW, _SHOWN_BY_BLOCK = 0.2, 0.63
#: The share of its products by which a cluster takes longer, as each of its blocks waits for the other to release a stage.
_WAITED = 0.0165
#: By blocks of a cluster, the share by which steps of ranges take longer than those of whole tiles: blocks that are side by side are at
#: different places along K, and what one has loaded is of no use to the next. The median of 132 pairs on an H200, 23 November 2026.
_SCATTERED = {1: 0.44, 2: 0.17}
#: Bounds that are near to each other add up in part, as their bursts do not meet: the norm of this order is taken, not their maximum.
#: That also puts in order configs that one bound holds alike, such as memory.
_TOGETHER = 12.0


def bound(*times: float) -> float:
    """How long work takes that goes on at once, from the times of its parts alone."""
    return float(sum(time**_TOGETHER for time in times) ** (1 / _TOGETHER))


def step_cycles(config: KernelConfig) -> float:
    """Cycles of the matrix units for one stage: operations, or reading both operands from shared memory."""
    multiplied = 2 * SIDE * config.tile_b * STEP_K / _OPERATIONS
    read = (SIDE + config.tile_b) * 2 * STEP_K / _SHARED_BYTES
    return config.sharing * config.blocks * (STEP // STEP_K) * max(multiplied, read)


def promoted_cycles(config: KernelConfig, by_block: bool, resident: int) -> float:
    """Cycles for one stage where its accumulators are then added to others, while other consumers of the SM multiply, if there are any.

    The CUDA cores of an SM add 128 accumulators in a cycle: one of each thread of a consumer.
    """
    shown = 1.0 if config.consumers * resident == 1 else _SHOWN_BY_BLOCK if by_block else _SHOWN_BY_ROW
    return step_cycles(config) + shown * (config.accumulators + len(config.portions) * _TURN)


def cost(config: KernelConfig, splits: int, shape: Shape, multiprocessors: int) -> float:
    """Microseconds that a solution should take."""
    rows_a, rows_b = rows_of(config, shape)
    all_steps, resident, steps, tiles = _work(config, splits, shape, multiprocessors)
    # A stage is loaded while the others are on their way, by all blocks of the SM.
    loaded = max(_LATENCY / (config.stages * resident), config.stage_bytes / _SM)
    cycles = promoted_cycles(config, shape.scale == "block", resident) if config.promoted else step_cycles(config)
    cycles *= 1 + _WAITED * (config.cluster - 1)
    step = bound(cycles / _CYCLES_A_US, loaded)
    out = BYTES[shape.outdtype]
    tile = config.tile_a * config.tile_b * out / _STORED / _CYCLES_A_US / config.sharing
    tile += _GIVING * ceil_div(config.all_panels, config.panels) / _CYCLES_A_US if config.panels else 0.0
    multiplied = steps * step + tiles * tile + _LATENCY
    if config.turns:  # a tile is stored while the next is multiplied: each consumer has twice as long for its own
        multiplied -= (tiles - 1) * min(tile, (steps / tiles * step + tile) / 2)
    from_l2 = all_steps * (config.tile_a + config.tile_b / config.cluster) * STEP_BYTES / _L2
    from_memory = (ELEMENT_BYTES[shape.dtype] * shape.k * (rows_a + rows_b) + out * shape.m * shape.n) / _MEMORY
    met = _met(config, splits, shape, multiprocessors)
    parts = 2 * met * config.sharing * slot_bytes(config.accumulators) / _L2 + _MEETING if met else 0.0
    return bound(multiplied, from_l2, from_memory) + parts


def _work(config: KernelConfig, splits: int, shape: Shape, multiprocessors: int) -> tuple[int, int, float, int]:
    """Steps of all blocks, blocks of an SM, and steps, in time those of whole tiles, and ends of tiles of the SM that has most."""
    tiles = tiles_of(config, shape)
    if config.stream:
        found, whole = shared_evenly(config, shape, multiprocessors), steps_of(shape)
        resident = min(config.resident, ceil_div(found.clusters * config.cluster, multiprocessors))
        steps = found.rounds * whole + found.length * (1 + _SCATTERED[config.cluster])
        ends = found.rounds + ceil_div(found.length, whole)
        return tiles * whole, resident, steps * resident, ends * resident
    items, places, part = tiles * splits, multiprocessors * config.resident, part_of(splits, shape)
    resident = min(config.resident, ceil_div(items, multiprocessors))
    rounds = ceil_div(items, places) * resident
    return items * part, resident, rounds * part, rounds


def _met(config: KernelConfig, splits: int, shape: Shape, multiprocessors: int) -> int:
    """Parts that blocks leave and load again: where steps are shared one for each end of a range within a tile."""
    if not config.stream:
        return tiles_of(config, shape) * splits if splits > 1 else 0
    found, steps = shared_evenly(config, shape, multiprocessors), steps_of(shape)
    ends = (found.tiles * steps - 1) // found.length
    return config.cluster * (ends - ends // (steps // math.gcd(found.length, steps)))
