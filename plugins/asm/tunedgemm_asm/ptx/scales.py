"""Scales of the whole tensor or of each row: a tile's sums are multiplied by them once, in float32."""

from __future__ import annotations

from tunedgemm_asm.ptx.arguments import SCALES, argument
from tunedgemm_asm.ptx.fragment import columns_of_thread, place_of_sum, rows_of_thread
from tunedgemm_asm.ptx.frame import Frame

_BYTES = 4


def scale_bases(f: Frame) -> tuple[str, str]:
    """The addresses of the scales of a and of b."""
    x, weight = (f.text.to("b64", "ld.param.u64", argument(name)) for name in SCALES)
    return (weight, x) if f.plan.swapped else (x, weight)


def scaled(f: Frame, row: str, column: str, sums: list[str]) -> list[str]:
    """The sums of a tile in float32, times the scales of their rows and columns; *row* and *column* are those of the first."""
    t, plan = f.text, f.plan
    base_a, base_b = scale_bases(f)
    rows, columns, whole = rows_of_thread(plan), columns_of_thread(plan), f.variant.scale == "tensor"
    if whole:
        only_a, only_b = (t.to("f32", "ld.global.nc.f32", f"[{base}]") for base in (base_a, base_b))
        of_a, of_b = [only_a] * len(rows), [only_b] * 2
    else:
        of_a = _loaded(f, base_a, row, rows, "rows_a")
    # Columns of an odd number may end within a pair, so may rows of x where operands are swapped.
    paired, results = f.variant.together > 1 and not plan.swapped, list(sums)
    for at in range(0, len(columns), 2):
        if not whole:
            of_b = _loaded(f, base_b, column, columns[at : at + 2], "rows_b", paired)
        for place, one, of_row in ((place_of_sum(plan, low, at + one), one, of_a[low]) for low in range(len(rows)) for one in (0, 1)):
            value = sums[place] if f.variant.sum_kind == "f32" else t.to("f32", "cvt.rn.f32.s32", sums[place])
            value = t.to("f32", "mul.rn.f32", value, of_row)
            results[place] = t.to("f32", "mul.rn.f32", value, of_b[one])
    return results


def _loaded(f: Frame, base: str, first: str, steps: list[int], limit: str, paired: bool = False) -> list[str]:
    """The scales of the rows so far behind the first, zeros beyond the operand; two of them in one access where they are *paired*."""
    t = f.text
    far = t.to("b64", "mul.wide.u32", first, _BYTES)
    start = t.to("b64", "add.s64", base, far)
    found = [t.to("f32", "mov.f32", "0f00000000") for _ in steps]
    inside = [t.to("pred", "setp.lt.u32", t.to("b32", "add.u32", first, step), f.arguments[limit]) for step in steps]
    if paired:
        t.op("ld.global.nc.v2.f32", f"{{{', '.join(found)}}}", f"[{start}+{steps[0] * _BYTES}]", when=inside[0])
        return found
    for each, step, when in zip(found, steps, inside, strict=True):
        t.op("ld.global.nc.f32", each, f"[{start}+{step * _BYTES}]", when=when)
    return found
