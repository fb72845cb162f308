"""Promotion: the sums of one stage are added to a tile's in float32, times the scales of its blocks where scales go by block.

A stage is 128 elements of K, as long as a block of scales. Of x each row has a scale for each block of K, of the weight each 128 rows.
Rows beyond an operand take the scales of its last row: their sums are not stored.
"""

from __future__ import annotations

import math

import attrs

from tunedgemm_asm.ptx.fragment import columns_of_thread, first_sum, place_of_sum, rows_of_thread
from tunedgemm_asm.ptx.frame import Frame
from tunedgemm_asm.ptx.order import Place
from tunedgemm_asm.ptx.plan import SCALE_BLOCK, Plan
from tunedgemm_asm.ptx.scales import scale_bases

_BYTES, _BLOCK_BITS = 4, SCALE_BLOCK.bit_length() - 1


def span_of(plan: Plan) -> int:
    """Rows of the weight in a tile that never lie in two blocks of scales, wherever the tile begins."""
    return math.gcd(plan.tile_n, SCALE_BLOCK)


def two_blocks_at_most(plan: Plan) -> bool:
    """Whether a consumer's rows of the weight lie in one block of scales where operands are swapped, else in two at most."""
    if plan.swapped:
        return SCALE_BLOCK % plan.rows == 0
    return SCALE_BLOCK - span_of(plan) + plan.tile_n <= 2 * SCALE_BLOCK


@attrs.frozen
class BlockScales:
    """Where a thread's scales of an item lie, as registers.

    Attributes:
        x, weight: addresses of the scales of the first row's next block of K.
        rows: places of the thread's rows of x behind it.
        blocks: the same of the weight: its block of rows, and the next where a tile may lie in two.
        second: whether spans of a tile's columns, but for the first, take the scale of the second block.
    """

    x: str
    weight: str
    rows: list[str]
    blocks: list[str]
    second: list[str]

    @classmethod
    def of(cls, f: Frame, place: Place, number: str) -> BlockScales:
        """Those of an item, for the consumer of a number."""
        t, plan = f.text, f.plan
        row_a = t.to("b32", "mad.lo.u32", number, plan.rows, place.row_a)
        row, column = first_sum(f, row_a, place.row_b)
        bases = [t.to("b64", "mov.b64", base) for base in scale_bases(f)]
        (x, weight), (rows, limit) = bases, (f.arguments["rows_a"], f.arguments["rows_b"])
        first, steps, begin = row, rows_of_thread(plan), place.row_b
        if plan.swapped:
            (weight, x), (limit, rows) = bases, (rows, limit)
            first, steps, begin = column, columns_of_thread(plan), row_a
        block = t.to("b32", "shr.u32", begin, _BLOCK_BITS)
        blocks = t.to("b32", "shr.u32", t.to("b32", "add.u32", limit, SCALE_BLOCK - 1), _BLOCK_BITS)
        within, second = t.to("b32", "and.b32", begin, SCALE_BLOCK - 1), []
        if not plan.swapped and SCALE_BLOCK % plan.tile_n:
            fars = [t.to("b32", "add.u32", within, far) for far in range(span_of(plan), plan.tile_n, span_of(plan))]
            second = [t.to("pred", "setp.ge.u32", far, SCALE_BLOCK) for far in fars]
        return cls(
            x=x,
            weight=weight,
            rows=[_place(f, t.to("b32", "add.u32", first, step), rows, place) for step in steps],
            blocks=[_place(f, t.to("b32", "add.u32", block, step), blocks, place) for step in range(2 if second else 1)],
            second=second,
        )

    def load(self, f: Frame) -> tuple[list[str], list[str]]:
        """The scales of the next block of K: of the thread's rows of x, and of the weight's blocks."""
        found = _loaded(f, self.x, self.rows), _loaded(f, self.weight, self.blocks)
        for base in (self.x, self.weight):
            f.text.op("add.s64", base, base, _BYTES)
        return found


def _place(f: Frame, row: str, rows: str, place: Place) -> str:
    """The place of a row's first scale of an item; there is one in each row for each step of K."""
    t = f.text
    last = t.to("b32", "sub.u32", rows, 1)
    row = t.to("b32", "min.u32", row, last)
    return t.to("b32", "mad.lo.u32", row, f.arguments["steps"], place.first)


def _loaded(f: Frame, base: str, places: list[str]) -> list[str]:
    t = f.text
    return [t.to("f32", "ld.global.nc.f32", f"[{t.to('b64', 'mad.wide.u32', place, _BYTES, base)}]") for place in places]


def promote(f: Frame, sums: list[str], parts: list[str]) -> None:
    """Add the sums of a stage as they are."""
    for mine, part in zip(sums, parts, strict=True):
        f.text.op("add.rn.f32", mine, mine, part)


def promote_scaled(
    f: Frame, sums: tuple[list[str], list[str]], portion: tuple[int, int], scales: BlockScales, loaded: tuple[list[str], list[str]]
) -> None:
    """Add the sums of a stage times what its scales of x and of the weight make: one multiplication for each row and span of columns.

    Args:
        sums: of a tile and of a stage, those of one portion.
        portion: which, as `Plan.portions` has it.
    """
    t, plan, (wholes, parts) = f.text, f.plan, sums
    (block, first), (of_x, of_weight) = portion, loaded
    factors: list[str] = []
    # Of 8 columns a thread has two.
    begin, span = first // 4, span_of(plan) // 4
    for column in range(begin, begin + plan.portion // 4):
        if plan.swapped:
            factors = [t.to("f32", "mul.rn.f32", of_x[column], of_weight[0])] * 2
        elif column % span == 0 or column == begin:
            at = column // span
            own = t.to("f32", "selp.f32", of_weight[1], of_weight[0], scales.second[at - 1]) if at else of_weight[0]
            factors = [t.to("f32", "mul.rn.f32", each, own) for each in of_x[2 * block : 2 * block + 2]]
        for row, factor in enumerate(factors):
            at = place_of_sum(plan, row, column - begin)
            t.op("fma.rn.f32", wholes[at], parts[at], factor, wholes[at])
