"""Promote the accumulators of a stage to fp32 accumulators of the tile, scaled by block where
needed.

A stage is 128 elements of K, one scale block. x has a scale for each row and block of K, the weight
for each 128 rows and block of K. Rows outside an operand use the scales of its last row and are not
stored.
"""

from __future__ import annotations

import math

import attrs

from tunedgemm_asm.ptx.fragment import columns_of_thread, first_accumulator, index_of_accumulator, rows_of_thread
from tunedgemm_asm.ptx.frame import Frame
from tunedgemm_asm.ptx.names import SCALE_BLOCK, KernelConfig
from tunedgemm_asm.ptx.order import Place
from tunedgemm_asm.ptx.scales import scale_bases

#: Scales to whose multiple a padded step is rounded up, and the mask of such a multiple.
_PADDED = 4
_WHOLE = (1 << 32) - _PADDED
_BYTES, _BLOCK_BITS = 4, SCALE_BLOCK.bit_length() - 1
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


@attrs.frozen
class BlockScales:
    """Addresses of a thread's scales of an item, as registers.

    Attributes:
        x, weight: addresses of the scales of the next block of K.
        rows: indices of the thread's rows of x, relative to *x*.
        blocks: indices of the weight's blocks that the tile may reach, relative to *weight*.
        next: offset of a span -> predicate: whether the span is in the next block.
        step: bytes to x's scale of the next block of K: one scale, or a row of scales, which may be
            padded, where transposed.
    """

    x: str
    weight: str
    rows: list[str]
    blocks: list[str]
    next: dict[int, str]
    step: object = _BYTES

    @classmethod
    def of(cls, f: Frame, place: Place, number: str) -> BlockScales:
        """Return the addresses of an item for the consumer *number*."""
        t, config = f.text, f.config
        row_a = t.to("b32", "mad.lo.u32", number, config.rows, place.row_a)
        row, column = first_accumulator(f, row_a, place.row_b)
        bases = [t.to("b64", "mov.b64", base) for base in scale_bases(f)]
        (x, weight), (rows, limit) = bases, (f.arguments["rows_a"], f.arguments["rows_b"])
        first, steps, begin = row, rows_of_thread(config), place.row_b
        if config.swapped:
            (weight, x), (limit, rows) = bases, (rows, limit)
            first, steps, begin = column, columns_of_thread(config), row_a
        block = t.to("b32", "shr.u32", begin, _BLOCK_BITS)
        blocks = t.to("b32", "shr.u32", t.to("b32", "add.u32", limit, SCALE_BLOCK - 1), _BLOCK_BITS)
        within = t.to("b32", "and.b32", begin, SCALE_BLOCK - 1)
        stride = ""
        if f.variant.transposed:
            stride = t.to("b32", "and.b32", t.to("b32", "add.u32", rows, _PADDED - 1), _WHOLE) if f.variant.padded else rows
        return cls(
            x=x,
            weight=weight,
            rows=[_first_scale(f, t.to("b32", "add.u32", first, step), rows, place, stride) for step in steps],
            blocks=[_first_scale(f, t.to("b32", "add.u32", block, step), blocks, place) for step in range(blocks_of(config))],
            next={far: t.to("pred", "setp.ge.u32", within, SCALE_BLOCK - far) for far in offsets_of(config)},
            step=t.to("b64", "mul.wide.u32", stride, _BYTES) if stride else _BYTES,
        )

    def load(self, f: Frame, when: str = "") -> LoadedScales:
        """Load the scales of the next block of K into new registers; *when*: predicate or ""."""
        loaded = f.text.many("f32", len(self.rows)), f.text.many("f32", len(self.blocks))
        self.fill(f, loaded, when)
        return loaded

    def take(self, f: Frame, loaded: LoadedScales, more: str) -> LoadedScales:
        """Copy *loaded* to new registers and start to load the scales of the next block of K.

        Args:
            more: predicate: whether another block exists.
        """
        of_x, of_weight = ([f.text.to("f32", "mov.f32", register) for register in registers] for registers in loaded)
        self.fill(f, loaded, more)
        return of_x, of_weight

    def fill(self, f: Frame, to: LoadedScales, when: str) -> None:
        """Load the scales of the next block of K; *when*: predicate or ""."""
        for base, indices, registers, step in ((self.x, self.rows, to[0], self.step), (self.weight, self.blocks, to[1], _BYTES)):
            for index, register in zip(indices, registers, strict=True):
                address = f.text.to("b64", "mad.wide.u32", index, _BYTES, base)
                f.text.op("ld.global.nc.f32", register, f"[{address}]", when=when)
            f.text.op("add.s64", base, base, step)


def _first_scale(f: Frame, row: str, rows: str, place: Place, stride: str = "") -> str:
    """Return the index of a row's first scale of an item, row by row or, with the *stride* of a
    step, step by step.
    """
    t = f.text
    last = t.to("b32", "sub.u32", rows, 1)
    row = t.to("b32", "min.u32", row, last)
    if stride:
        return t.to("b32", "mad.lo.u32", place.first, stride, row)
    return t.to("b32", "mad.lo.u32", row, f.arguments["steps"], place.first)


def promote(f: Frame, accumulators: list[str], parts: list[str]) -> None:
    """Add the accumulators of a stage unscaled."""
    for mine, part in zip(accumulators, parts, strict=True):
        f.text.op("add.rn.f32", mine, mine, part)


def promote_scaled(
    f: Frame, accumulators: tuple[list[str], list[str]], portion: tuple[int, int], scales: BlockScales, loaded: LoadedScales
) -> None:
    """Add the accumulators of a stage, scaled: one multiplication for each row and span of columns.

    Args:
        accumulators: registers of one portion, of the tile and of the stage.
        portion: an element of `KernelConfig.portions`.
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
            own = t.to("f32", "selp.f32", of_weight[at + 1], of_weight[at], scales.next[far]) if far in scales.next else of_weight[at]
            factors = [t.to("f32", "mul.rn.f32", of_row, own) for of_row in of_x[2 * block : 2 * block + 2]]
        for row, factor in enumerate(factors):
            at = index_of_accumulator(config, row, column - begin)
            t.op("fma.rn.f32", wholes[at], parts[at], factor, wholes[at])
