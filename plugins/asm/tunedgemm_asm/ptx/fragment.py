"""Map a thread's accumulators to rows and columns of the tile.

PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16" (same for k32): of each 8 columns a
thread has two, 2 (lane % 4) and the next, in row 16 warp + lane / 4 and in the row 8 below. Columns
are rows of b.
"""

from __future__ import annotations

from tunedgemm_asm.ptx.frame import Frame
from tunedgemm_asm.ptx.names import SIDE, UNIT_B, KernelConfig

#: Distance of a thread's two rows.
BELOW = 8


def first_accumulator(f: Frame, row_a: str, row_b: str) -> tuple[str, str]:
    """Return the row and column of a thread's first accumulator; *row_a*, *row_b* are its
    consumer's first.
    """
    t = f.text
    warp = t.to("b32", "bfe.u32", f.thread, 5, 2)
    row = t.to("b32", "shr.u32", f.lane, 2)
    row = t.to("b32", "mad.lo.u32", warp, 16, row)
    row = t.to("b32", "add.u32", row, row_a)
    pair = t.to("b32", "and.b32", f.lane, 3)
    return row, t.to("b32", "mad.lo.u32", pair, 2, row_b)


def rows_of_thread(config: KernelConfig) -> list[int]:
    """Return a thread's rows relative to its first: two in each block."""
    return [SIDE * block + low for block in range(config.blocks) for low in (0, BELOW)]


def columns_of_thread(config: KernelConfig) -> list[int]:
    """Return a thread's columns relative to its first."""
    return [first + odd for first in range(0, config.tile_b, UNIT_B) for odd in (0, 1)]


def index_of_accumulator(config: KernelConfig, row: int, column: int) -> int:
    """Return the index of the accumulator in a thread's row *row* and column *column*."""
    block, low = divmod(row, 2)
    octet, odd = divmod(column, 2)
    return block * config.accumulators_per_block + 4 * octet + 2 * low + odd
