"""The epilogue: a consumer's sums, with the bias, to the output.

PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16", accumulator: of each 8 columns a thread has two side by side, 2 (lane % 4)
and the next, in row 16 warp + lane / 4 and in the row 8 below. Columns are rows of b. Where operands are swapped they are rows of the
output.
"""

from __future__ import annotations

from tunedgemm_asm.ptx.frame import Frame
from tunedgemm_asm.ptx.plan import SIDE, UNIT_B

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
_TYPES = {"bf16": "bf16", "fp16": "f16", "fp32": "f32"}
#: Rows between the two of a thread.
_BELOW = 8


def store_tile(f: Frame, row_a: str, row_b: str, sums: list[str]) -> None:
    """Store what lies within the output."""
    t = f.text
    warp = t.to("b32", "bfe.u32", f.thread, 5, 2)
    row = t.to("b32", "shr.u32", f.lane, 2)
    row = t.to("b32", "mad.lo.u32", warp, 16, row)
    row = t.to("b32", "add.u32", row, row_a)
    pair = t.to("b32", "and.b32", f.lane, 3)
    column = t.to("b32", "mad.lo.u32", pair, 2, row_b)
    store = _store_swapped if f.plan.swapped else _store
    store(f, row, column, sums)


def _base(f: Frame, high: str, low: str) -> str:
    """The address of an element of the output."""
    t, size = f.text, BYTES[f.variant.outdtype]
    out = t.to("b64", "ld.param.u64", "[out]")
    wide = t.to("b64", "cvt.u64.u32", low)
    element = t.to("b64", "mul.wide.u32", high, f.arguments["stride"])
    element = t.to("b64", "add.s64", element, wide)
    return t.to("b64", "mad.lo.s64", element, size, out)


def _stride(f: Frame, rows: int) -> str:
    """Bytes from a row of the output to one further on."""
    return f.text.to("b64", "mul.wide.u32", f.arguments["stride"], rows * BYTES[f.variant.outdtype])


def _sooner(f: Frame, first: str, limit: str, steps: list[int]) -> list[str]:
    """Of each step whether it stays below a limit."""
    return [f.text.to("pred", "setp.lt.u32", f.text.to("b32", "add.u32", first, step), limit) for step in steps]


def _bias_at(f: Frame, index: str) -> str:
    """The address of one element of the bias."""
    t = f.text
    base = t.to("b64", "ld.param.u64", "[bias]")
    far = t.to("b64", "mul.wide.u32", index, BYTES[f.variant.bias])
    return t.to("b64", "add.s64", base, far)


def _bias(f: Frame, address: str, offset: int, when: str) -> str:
    """One element of the bias in float32, zero where it is not loaded."""
    t, kind = f.text, f.variant.bias
    at = f"[{address}+{offset * BYTES[kind]}]"
    value = t.to("f32", "mov.f32", "0f00000000")
    if kind == "fp32":
        t.op("ld.global.nc.f32", value, at, when=when)
        return value
    narrow = t.to("b16", "mov.u16", 0)
    t.op("ld.global.nc.b16", narrow, at, when=when)
    return t.to("f32", f"cvt.f32.{_TYPES[kind]}", narrow)


def _put(f: Frame, at: str, value: str, when: str) -> None:
    """Store one element."""
    t, kind = f.text, f.variant.outdtype
    if kind == "fp32":
        t.op("st.global.f32", at, value, when=when)
        return
    narrow = t.to("b16", f"cvt.rn.{_TYPES[kind]}.f32", value)
    t.op("st.global.b16", at, narrow, when=when)


def _put_two(f: Frame, address: str, offset: int, values: tuple[str, str], when: tuple[str, str]) -> None:
    """Store two elements side by side; in one access where rows have an even number of them, so that both lie within or beyond."""
    t, kind, size = f.text, f.variant.outdtype, BYTES[f.variant.outdtype]
    low, high = values
    if not f.variant.even:
        for index, value in enumerate(values):
            _put(f, f"[{address}+{(offset + index) * size}]", value, when[index])
        return
    at = f"[{address}+{offset * size}]"
    if kind == "fp32":
        t.op("st.global.v2.f32", at, f"{{{low}, {high}}}", when=when[0])
        return
    both = t.to("b32", f"cvt.rn.{_TYPES[kind]}x2.f32", high, low)
    t.op("st.global.b32", at, both, when=when[0])


def _store(f: Frame, row: str, column: str, sums: list[str]) -> None:
    """A thread's columns are columns of the output, and its two rows its rows."""
    t, plan, told = f.text, f.plan, f.arguments
    base, below, block = _base(f, row, column), _stride(f, _BELOW), _stride(f, SIDE)
    bases = []
    for _ in range(plan.blocks):
        bases.append((base, t.to("b64", "add.s64", base, below)))
        base = t.to("b64", "add.s64", base, block)
    rows = _sooner(f, row, told["rows_a"], [SIDE * at + low for at in range(plan.blocks) for low in (0, _BELOW)])
    bias = _bias_at(f, column) if f.variant.bias else ""
    for first in range(0, plan.tile_b, UNIT_B):
        inside = _sooner(f, column, told["rows_b"], [first, first + 1])
        added = [_bias(f, bias, first + index, inside[index]) for index in (0, 1)] if bias else []
        for at in range(plan.blocks):
            begin = at * plan.sums_of_block + first // 2
            for low in (0, 1):
                when = [t.to("pred", "and.pred", rows[2 * at + low], each) for each in inside[: 1 if f.variant.even else 2]]
                pair = sums[begin + 2 * low], sums[begin + 2 * low + 1]
                values = tuple(t.to("f32", "add.rn.f32", value, more) for value, more in zip(pair, added, strict=True)) if bias else pair
                _put_two(f, bases[at][low], first, (values[0], values[1]), (when[0], when[-1]))


def _store_swapped(f: Frame, row: str, column: str, sums: list[str]) -> None:
    """A thread's columns are rows of the output, and its two rows columns: lanes 4 apart store side by side."""
    t, plan, told = f.text, f.plan, f.arguments
    size = BYTES[f.variant.outdtype]
    base, one, eight = _base(f, column, row), _stride(f, 1), _stride(f, UNIT_B)
    steps = [SIDE * at + low for at in range(plan.blocks) for low in (0, _BELOW)]
    rows = _sooner(f, row, told["rows_a"], steps)
    bias = _bias_at(f, row) if f.variant.bias else ""
    added = [_bias(f, bias, step, inside) for step, inside in zip(steps, rows, strict=True)] if bias else []
    for first in range(0, plan.tile_b, UNIT_B):
        inside = _sooner(f, column, told["rows_b"], [first, first + 1])
        lines = base, t.to("b64", "add.s64", base, one)
        for index, step in enumerate(steps):
            begin = index // 2 * plan.sums_of_block + first // 2 + 2 * (index % 2)
            for place in (0, 1):
                value = sums[begin + place]
                value = t.to("f32", "add.rn.f32", value, added[index]) if bias else value
                when = t.to("pred", "and.pred", rows[index], inside[place])
                _put(f, f"[{lines[place]}+{step * size}]", value, when)
        base = t.to("b64", "add.s64", base, eight)
