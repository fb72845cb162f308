"""Promote the accumulators of a stage to fp32 accumulators of the tile, scaled by block where
needed.

A stage is 128 elements of K, one scale block. x has a scale for each row and block of K, the weight
for each 128 rows and block of K. Rows outside an operand use the scales of its last row and are not
stored.
"""

from __future__ import annotations

import math

from tunedgemm_asm.ptx.fragment import index_of_accumulator
from tunedgemm_asm.ptx.frame import Frame
from tunedgemm_asm.ptx.names import SCALE_BLOCK, KernelConfig
from tunedgemm_asm.ptx.order import Place

#: Scales to whose multiple a padded step is rounded up, and the mask of such a multiple.
_PADDED = 4
_WHOLE = (1 << 32) - _PADDED
BLOCK_BITS = SCALE_BLOCK.bit_length() - 1
#: Most predicates of a thread for offsets.
_MOST_OFFSETS = 7


def span_of(config: KernelConfig) -> int:
    """Return the rows of the weight that never span two scale blocks, wherever the tile begins."""
    return math.gcd(config.tile_n, SCALE_BLOCK)


def offsets_of(config: KernelConfig) -> list[int]:
    """Return the offsets of spans from the start of a scale block, for a tile that begins at one;
    not 0.

    In other tiles these spans may be in the next block.
    """
    if config.swapped or SCALE_BLOCK % config.tile_n == 0:
        return []
    return sorted({start % SCALE_BLOCK for start in range(0, config.tile_n, span_of(config))} - {0})


def blocks_of(config: KernelConfig) -> int:
    """Return the most scale blocks that a consumer's rows of the weight can touch."""
    if config.swapped:
        return 1
    last = (config.tile_n - span_of(config)) // SCALE_BLOCK
    return last + 1 + any(last * SCALE_BLOCK + offset < config.tile_n for offset in offsets_of(config))


def scales_by_block(config: KernelConfig) -> bool:
    """Check whether a thread has enough predicates for the spans of the weight's rows.

    With swapped operands, a consumer's rows must be in one block.
    """
    return SCALE_BLOCK % config.rows == 0 if config.swapped else len(offsets_of(config)) <= _MOST_OFFSETS


#: Registers with the scales of one block of K: of the thread's rows of x, and of the weight's
#: blocks.
LoadedScales = tuple[list[str], list[str]]


def step_of_scales(f: Frame, rows: str) -> str:
    """Return the scales of x from one block of K to the next, or "" where they are ordered by row."""
    t = f.text
    if not f.variant.transposed:
        return ""
    return t.to("b32", "and.b32", t.to("b32", "add.u32", rows, _PADDED - 1), _WHOLE) if f.variant.padded else rows


def next_blocks(f: Frame, place: Place) -> dict[int, str]:
    """Return by the offset of a span a predicate: whether the span is in the next block."""
    t = f.text
    within = t.to("b32", "and.b32", place.row_b, SCALE_BLOCK - 1)
    return {far: t.to("pred", "setp.ge.u32", within, SCALE_BLOCK - far) for far in offsets_of(f.config)}


def promote(f: Frame, accumulators: list[str], parts: list[str]) -> None:
    """Add the accumulators of a stage unscaled."""
    for mine, part in zip(accumulators, parts, strict=True):
        f.text.op("add.rn.f32", mine, mine, part)


def promote_scaled(
    f: Frame, accumulators: tuple[list[str], list[str]], portion: tuple[int, int], next_block: dict[int, str], loaded: LoadedScales
) -> None:
    """Add the accumulators of a stage, scaled: one multiplication for each row and span of columns.

    Args:
        accumulators: registers of one portion, of the tile and of the stage.
        portion: an element of `KernelConfig.portions`.
        next_block: offset of a span -> predicate: whether the span is in the next block.
    """
    t, config, (wholes, parts) = f.text, f.config, accumulators
    (block, first), (of_x, of_weight) = portion, loaded
    factors: list[str] = []
    # A thread has two of 8 columns.
    begin, span = first // 4, span_of(config) // 4
    for column in range(begin, begin + config.portion // 4):
        if config.swapped:
            factors = [t.to("f32", "mul.rn.f32", of_x[column], of_weight[0])] * 2
        elif column % span == 0 or column == begin:
            at, far = divmod(column // span * span_of(config), SCALE_BLOCK)
            own = t.to("f32", "selp.f32", of_weight[at + 1], of_weight[at], next_block[far]) if far in next_block else of_weight[at]
            factors = [t.to("f32", "mul.rn.f32", of_row, own) for of_row in of_x[2 * block : 2 * block + 2]]
        for row, factor in enumerate(factors):
            at = index_of_accumulator(config, row, column - begin)
            t.op("fma.rn.f32", wholes[at], parts[at], factor, wholes[at])
