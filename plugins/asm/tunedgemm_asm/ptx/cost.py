"""What a solution should take, to order a list by.

An SM of Hopper does 4096 operations of matrix instructions in a cycle. The other rates are fitted to 1102 times of eight shapes of 16-bit
operands on an H200 under load, 22 November 2026 (``benchmarks/asm_fit.py``): one that bounds none of them, as that of L2, is no fact.
Of 8-bit operands a stage has twice the elements, multiplied at twice the rate: it takes as long as one of 16 bits.
"""

from __future__ import annotations

from tunedgemm.plugin import Shape

from tunedgemm_asm.limits import ceil_div
from tunedgemm_asm.ptx.epilogue import BYTES
from tunedgemm_asm.ptx.plan import ELEMENT_BYTES, SIDE, STEP, STEP_BYTES, STEP_K, Plan
from tunedgemm_asm.ptx.problem import part_of, rows_of, units_of
from tunedgemm_asm.ptx.splitk import slot_bytes

_CYCLES_A_US, _OPERATIONS, _SHARED_BYTES = 1380.0, 4096, 124
_MEMORY, _L2 = 3.94e6, 14.8e6  # bytes in a microsecond
#: Bytes that one SM gets in a microsecond.
_SM = 24.1e4
#: Microseconds from a load to its arrival, of a launch, and of the end of a tile that splits K.
_LATENCY, _LAUNCH, _MEETING = 1.1, 3.1, 2.0
#: Bytes that a consumer stores in a cycle, its conversions and exchanges included.
_STORED = 9.3
#: What is assumed until it is measured of panels: bytes that a consumer writes in a cycle, and cycles to fence, meet and wait each time
#: that it has written to all places.
_TO_PANELS, _GIVING = 64, 200
#: Cycles from a consumer's last product of a stage to its sums, and from the last of those that it adds to its next product.
_TURN = 60


def step_cycles(plan: Plan) -> float:
    """Cycles of the matrix units for one stage: operations, or reading both operands from shared memory."""
    multiplied = 2 * SIDE * plan.tile_b * STEP_K / _OPERATIONS
    read = (SIDE + plan.tile_b) * 2 * STEP_K / _SHARED_BYTES
    return plan.sharing * plan.blocks * (STEP // STEP_K) * max(multiplied, read)


def promoted_cycles(plan: Plan) -> float:
    """Cycles for one stage where its sums are then added to others, while other consumers multiply.

    The CUDA cores of an SM add 128 sums in a cycle: one of each thread of a consumer.
    """
    multiplied = step_cycles(plan)
    return max(multiplied, (multiplied / plan.consumers + plan.sums + len(plan.portions) * _TURN) / plan.resident)


def cost(plan: Plan, splits: int, shape: Shape, multiprocessors: int) -> float:
    """Microseconds that a solution should take."""
    (units_a, tiles_b), (rows_a, rows_b) = units_of(plan, shape), rows_of(plan, shape)
    items, places = units_a * plan.cluster * tiles_b * splits, multiprocessors * plan.resident
    steps, resident = part_of(splits, shape), min(plan.resident, ceil_div(items, multiprocessors))
    rounds = ceil_div(items, places) * resident
    # A stage is loaded while the others are on their way, by all blocks of the SM.
    loaded = max(_LATENCY / (plan.stages * resident), plan.stage_bytes / _SM)
    step = max((promoted_cycles(plan) if plan.promoted else step_cycles(plan)) / _CYCLES_A_US, loaded)
    out = BYTES[shape.outdtype]
    tile = plan.tile_a * plan.tile_b * out / (_TO_PANELS if plan.panels else _STORED) / _CYCLES_A_US / plan.sharing
    tile += _GIVING * ceil_div(plan.all_panels, plan.panels) / _CYCLES_A_US if plan.panels else 0.0
    multiplied = rounds * (steps * step + tile) + _LATENCY
    if plan.turns:  # a tile is stored while the next is multiplied: each consumer has twice as long for its own
        multiplied -= (rounds - 1) * min(tile, (steps * step + tile) / 2)
    from_l2 = items * steps * (plan.tile_a + plan.tile_b / plan.cluster) * STEP_BYTES / _L2
    from_memory = (ELEMENT_BYTES[shape.dtype] * shape.k * (rows_a + rows_b) + out * shape.m * shape.n) / _MEMORY
    parts = 2 * items * plan.sharing * slot_bytes(plan.sums) / _L2 + _MEETING if splits > 1 else 0.0
    return max(multiplied, from_l2, from_memory) + parts + _LAUNCH
