"""Multiply a tile's accumulators once, in fp32, by the scales of tensors or rows."""

from __future__ import annotations

import attrs

from tunedgemm_asm.ptx.abi import SCALES, argument
from tunedgemm_asm.ptx.fragment import index_of_accumulator, rows_of_thread
from tunedgemm_asm.ptx.frame import Frame
from tunedgemm_asm.ptx.panels import column_load

_BYTES = 4


def scale_bases(f: Frame) -> tuple[str, str]:
    """Return the addresses of the scales of a and of b."""
    x, weight = (f.text.to("b64", "ld.param.u64", argument(name)) for name in SCALES)
    return (weight, x) if f.config.swapped else (x, weight)


@attrs.frozen
class Factors:
    """Factors of a tile's accumulators, as registers.

    Attributes:
        rows: scales of the thread's rows.
        base: address of the scales of b.
        whole: the only scale of b, twice; empty where each row has one.
    """

    rows: list[str]
    base: str
    whole: list[str]

    @classmethod
    def of(cls, f: Frame, row: str) -> Factors:
        """Load the row factors of a tile; *row* is that of the thread's first accumulator."""
        base_a, base_b = scale_bases(f)
        rows = rows_of_thread(f.config)
        if f.variant.scale == "row":
            return cls(_loaded(f, base_a, row, rows, "rows_a"), base_b, [])
        only_a, only_b = (f.text.to("f32", "ld.global.nc.f32", f"[{base}]") for base in (base_a, base_b))
        return cls([only_a] * len(rows), base_b, [only_b] * 2)

    def load(self, f: Frame, column: str, octets: range) -> dict[int, list[str]]:
        """Return both scales of each 8 columns, by their offset from the first accumulator's
        *column*.
        """
        # With an odd number of columns, or swapped operands, the last pair may be half outside.
        paired = f.variant.together > 1 and not f.config.swapped
        return {first: self.whole or _loaded(f, self.base, column, [first, first + 1], "rows_b", paired) for first in octets}

    def times(self, f: Frame, accumulators: list[str], loaded: dict[int, list[str]]) -> list[str]:
        """Return the accumulators in fp32 with the *loaded* columns scaled."""
        t, config, results = f.text, f.config, list(accumulators)
        for first, of_b in loaded.items():
            for low, of_row in enumerate(self.rows):
                for odd in (0, 1):
                    index = index_of_accumulator(config, low, first // 4 + odd)
                    value = (
                        accumulators[index] if f.variant.accumulator_kind == "f32" else t.to("f32", "cvt.rn.f32.s32", accumulators[index])
                    )
                    # The scale of x comes first: so operands, swapped or not, give the same bits.
                    for factor in (of_b[odd], of_row) if config.swapped else (of_row, of_b[odd]):
                        value = t.to("f32", "mul.rn.f32", value, factor)
                    results[index] = value
        return results


def _loaded(f: Frame, base: str, first: str, steps: list[int], limit: str, paired: bool = False) -> list[str]:
    """Load the scales of rows at these offsets, zeros outside the operand; *paired* loads two at
    once.
    """
    t = f.text
    far = t.to("b64", "mul.wide.u32", first, _BYTES)
    start = t.to("b64", "add.s64", base, far)
    loaded = [t.to("f32", "mov.f32", "0f00000000") for _ in steps]
    inside = [t.to("pred", "setp.lt.u32", t.to("b32", "add.u32", first, step), f.arguments[limit]) for step in steps]
    if paired:
        t.op(f"{column_load(f)}.v2.f32", f"{{{', '.join(loaded)}}}", f"[{start}+{steps[0] * _BYTES}]", when=inside[0])
        return loaded
    for register, step, when in zip(loaded, steps, inside, strict=True):
        t.op("ld.global.nc.f32", register, f"[{start}+{step * _BYTES}]", when=when)
    return loaded
