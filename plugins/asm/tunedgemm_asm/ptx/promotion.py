"""Promote the accumulators of a stage to fp32 accumulators of the tile, scaled by block where
needed.

A stage is 128 elements of K, one scale block. x has a scale for each row and block of K, the weight
for each 128 rows and block of K.
"""

from __future__ import annotations

from tunedgemm_asm.ptx.fragment import index_of_accumulator
from tunedgemm_asm.ptx.frame import Frame

#: Registers with a portion's scales of one block of K: of the thread's rows of x, and of the spans
#: of the weight's rows.
LoadedScales = tuple[list[str], list[str]]


def promote(f: Frame, accumulators: list[str], parts: list[str]) -> None:
    """Add the accumulators of a stage unscaled."""
    for mine, part in zip(accumulators, parts, strict=True):
        f.text.op("add.rn.f32", mine, mine, part)


def promote_scaled(f: Frame, accumulators: list[str], parts: list[str], first: int, loaded: LoadedScales) -> None:
    """Add the accumulators of a stage, scaled: one multiplication for each row and span of columns.

    Args:
        accumulators, parts: registers of one portion, of the tile and of the stage.
        first: the portion's first row of b.
        loaded: the portion's scales.
    """
    t, config, (of_x, of_weight) = f.text, f.config, loaded
    factors: list[str] = []
    # A thread has two of 8 columns.
    begin, span = first // 4, config.span // 4
    for column in range(config.portion // 4):
        if config.swapped:
            factors = [t.to("f32", "mul.rn.f32", of_x[column], of_weight[0])] * 2
        elif (begin + column) % span == 0 or not column:
            own = of_weight[(begin + column) // span - begin // span]
            factors = [t.to("f32", "mul.rn.f32", of_row, own) for of_row in of_x]
        for row, factor in enumerate(factors):
            at = index_of_accumulator(config, row, column)
            t.op("fma.rn.f32", accumulators[at], parts[at], factor, accumulators[at])
