"""Store a consumer's accumulators, with scales and bias, to the output.

Columns of accumulators (`fragment`) are rows of b; with swapped operands they are rows of the
output.
"""

from __future__ import annotations

from tunedgemm_asm.ptx.abi import argument
from tunedgemm_asm.ptx.fragment import BELOW, first_accumulator
from tunedgemm_asm.ptx.frame import Frame
from tunedgemm_asm.ptx.names import LINE, SIDE, UNIT_B
from tunedgemm_asm.ptx.panels import Panels, column_load
from tunedgemm_asm.ptx.scales import Factors

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
_TYPES = {"bf16": "bf16", "fp16": "f16", "fp32": "f32"}
#: 16-bit elements that the four lanes of a row store at once.
_WIDE = 4 * LINE


def store_tile(f: Frame, row_a: str, row_b: str, accumulators: list[str]) -> None:
    """Store the part of the tile that is inside the output."""
    row, column = first_accumulator(f, row_a, row_b)
    factors = Factors.of(f, row) if f.variant.scale in ("tensor", "row") else None
    if f.config.panels:
        _store_panels(f, (row_a, row_b), column, accumulators, factors)
        return
    for first in range(0, f.config.tile_b, UNIT_B):
        accumulators = factors.times(f, accumulators, factors.load(f, column, range(first, first + 1))) if factors else accumulators
    store = _store_swapped if f.config.swapped else _store
    store(f, row, column, accumulators)


def _base(f: Frame, high: str, low: str) -> str:
    """Return the address of an element of the output."""
    t, size = f.text, BYTES[f.variant.outdtype]
    out = t.to("b64", "ld.param.u64", argument("out"))
    wide = t.to("b64", "cvt.u64.u32", low)
    element = t.to("b64", "mul.wide.u32", high, f.arguments["stride"])
    element = t.to("b64", "add.s64", element, wide)
    return t.to("b64", "mad.lo.s64", element, size, out)


def _stride(f: Frame, rows: int) -> str:
    """Return the bytes between output rows this many rows apart."""
    return f.text.to("b64", "mul.wide.u32", f.arguments["stride"], rows * BYTES[f.variant.outdtype])


def _sooner(f: Frame, first: str, limit: str, steps: list[int]) -> list[str]:
    """Return a predicate for each step: whether it stays below the limit."""
    return [f.text.to("pred", "setp.lt.u32", f.text.to("b32", "add.u32", first, step), limit) for step in steps]


def _bias_at(f: Frame, index: str) -> str:
    """Return the address of an element of the bias."""
    t = f.text
    base = t.to("b64", "ld.param.u64", argument("bias"))
    far = t.to("b64", "mul.wide.u32", index, BYTES[f.variant.bias])
    return t.to("b64", "add.s64", base, far)


def _bias(f: Frame, address: str, offset: int, when: str) -> str:
    """Return an element of the bias in fp32, zero where it is not loaded."""
    t, kind = f.text, f.variant.bias
    at = f"[{address}+{offset * BYTES[kind]}]"
    if kind == "fp32":
        value = t.to("f32", "mov.f32", "0f00000000")
        t.op("ld.global.nc.f32", value, at, when=when)
        return value
    narrow = t.to("b16", "mov.u16", 0)
    t.op("ld.global.nc.b16", narrow, at, when=when)
    return t.to("f32", f"cvt.f32.{_TYPES[kind]}", narrow)


def _two_of_bias(f: Frame, address: str, offset: int, when: list[str]) -> list[str]:
    """Return two adjacent elements of the bias; one access where both are inside or both outside."""
    t, kind = f.text, f.variant.bias
    if f.variant.together == 1:
        return [_bias(f, address, offset + index, when[index]) for index in (0, 1)]
    at = f"[{address}+{offset * BYTES[kind]}]"
    if kind == "fp32":
        pair = [t.to("f32", "mov.f32", "0f00000000") for _ in range(2)]
        t.op(f"{column_load(f)}.v2.f32", f"{{{', '.join(pair)}}}", at, when=when[0])
        return pair
    narrow = [t.to("b16", "mov.u16", 0) for _ in range(2)]
    t.op(f"{column_load(f)}.v2.b16", f"{{{', '.join(narrow)}}}", at, when=when[0])
    return [t.to("f32", f"cvt.f32.{_TYPES[kind]}", value) for value in narrow]


def _put(f: Frame, at: str, value: str, when: str) -> None:
    """Store one element."""
    t, kind = f.text, f.variant.outdtype
    if kind == "fp32":
        t.op("st.global.f32", at, value, when=when)
        return
    narrow = t.to("b16", f"cvt.rn.{_TYPES[kind]}.f32", value)
    t.op("st.global.b16", at, narrow, when=when)


def _packed(f: Frame, low: str, high: str) -> str:
    """Pack two 16-bit elements into one register."""
    return f.text.to("b32", f"cvt.rn.{_TYPES[f.variant.outdtype]}x2.f32", high, low)


def _put_two(f: Frame, address: str, offset: int, values: list[str], when: list[str]) -> None:
    """Store two adjacent elements; one access where both are inside or both outside."""
    t, kind, size = f.text, f.variant.outdtype, BYTES[f.variant.outdtype]
    if f.variant.together == 1:
        for index, value in enumerate(values):
            _put(f, f"[{address}+{(offset + index) * size}]", value, when[index])
    elif kind == "fp32":
        t.op("st.global.v2.f32", f"[{address}+{offset * size}]", f"{{{', '.join(values)}}}", when=when[0])
    else:
        t.op("st.global.b32", f"[{address}+{offset * size}]", _packed(f, *values), when=when[0])


def _transposed(f: Frame, registers: list[str]) -> list[str]:
    """Transpose registers 0 to 3 of four adjacent lanes: lane i gets register i of all, by two
    shuffles.
    """
    t = f.text
    for far in (1, 2):
        upper = t.to("pred", "setp.ne.u32", t.to("b32", "and.b32", f.lane, far), 0)
        for low in (0, 1) if far == 2 else (0, 2):
            mine, theirs = registers[low], registers[low + far]
            sent = t.to("b32", "selp.b32", mine, theirs, upper)
            got = t.to("b32", "shfl.sync.bfly.b32", sent, far, 31, -1)
            registers[low] = t.to("b32", "selp.b32", got, mine, upper)
            registers[low + far] = t.to("b32", "selp.b32", theirs, got, upper)
    return registers


def _columns(f: Frame, first: int, accumulators: list[str], bias: tuple[str, list[str]]) -> list[list[str]]:
    """Return the accumulators of 8 columns from *first* on, two for each row of each block, plus
    the bias.

    *bias* has the address of the bias and the predicates of columns inside the output.
    """
    address, inside = bias
    added = _two_of_bias(f, address, first, inside) if address else []
    begins = [at * f.config.accumulators_per_block + first // 2 + low for at in range(f.config.blocks) for low in (0, 2)]
    pairs = [accumulators[begin : begin + 2] for begin in begins]
    return [[f.text.to("f32", "add.rn.f32", *terms) for terms in zip(pair, added, strict=True)] for pair in pairs] if added else pairs


def _store(f: Frame, row: str, column: str, accumulators: list[str]) -> None:
    """Store a tile whose columns and rows are those of the output.

    Where rows are multiples of 8 elements of 16 bits, four lanes transpose 32 columns and store 8
    each.
    """
    t, config, numbers = f.text, f.config, f.arguments
    bases = _line_bases(f, _base(f, row, column))
    rows = _sooner(f, row, numbers["rows_a"], [SIDE * at + low for at in range(config.blocks) for low in (0, BELOW)])
    bias = _bias_at(f, column) if f.variant.bias else ""
    narrow = f.variant.outdtype != "fp32" and f.variant.together == LINE
    wide = config.tile_b // _WIDE * _WIDE if narrow else 0
    shift = t.to("b32", "mul.lo.u32", t.to("b32", "and.b32", f.lane, 3), 6)  # from column 2 i of a lane to column 8 i
    for start in range(0, wide, _WIDE):
        octets = range(start, start + _WIDE, UNIT_B)
        parts = [_columns(f, first, accumulators, (bias, _sooner(f, column, numbers["rows_b"], [first]))) for first in octets]
        inside = _sooner(f, t.to("b32", "add.u32", column, shift), numbers["rows_b"], [start])
        for at, base in enumerate(bases):
            mine = _transposed(f, [_packed(f, *part[at]) for part in parts])
            far = t.to("b64", "mul.wide.u32", shift, BYTES[f.variant.outdtype])
            to = t.to("b64", "add.s64", base, far)
            when = t.to("pred", "and.pred", rows[at], inside[0])
            t.op("st.global.v4.b32", f"[{to}+{start * BYTES[f.variant.outdtype]}]", f"{{{', '.join(mine)}}}", when=when)
    for first in range(wide, config.tile_b, UNIT_B):
        inside = _sooner(f, column, numbers["rows_b"], [first, first + 1][: 2 if f.variant.together == 1 else 1])
        for at, values in enumerate(_columns(f, first, accumulators, (bias, inside))):
            _put_two(f, bases[at], first, values, [t.to("pred", "and.pred", rows[at], column_inside) for column_inside in inside])


def _store_panels(f: Frame, begin: tuple[str, str], column: str, accumulators: list[str], factors: Factors | None) -> None:
    """Store the tile with TMA, one panel after the other; *begin* is the consumer's first row and
    column.

    The scales of a panel are loaded while the previous one is stored.
    """
    config, width = f.config, f.config.panel_columns
    bias = _bias_at(f, column) if f.variant.bias else ""
    ahead = factors.load(f, column, range(0, width, UNIT_B)) if factors else {}
    panels = Panels.of(f, begin)
    for first in range(0, config.tile_b, width):
        values = factors.times(f, accumulators, ahead) if factors else accumulators
        parts = []
        for octet in range(first, first + width, UNIT_B):
            parts.append(_columns(f, octet, values, (bias, _sooner(f, column, f.arguments["rows_b"], [octet]) if bias else [])))
        packed = [[_packed(f, *part[2 * block + low]) for part in parts for low in (0, 1)] for block in range(config.blocks)]
        if factors and first + width < config.tile_b:
            ahead = factors.load(f, column, range(first + width, first + 2 * width, UNIT_B))
        for block, registers in enumerate(packed):
            panels.store(f, first // width * config.blocks + block, registers)


def _line_bases(f: Frame, base: str) -> list[str]:
    """Return the address of a thread's first element in each of its rows, two in each block."""
    t, below, block, bases = f.text, _stride(f, BELOW), _stride(f, SIDE), []
    for _ in range(f.config.blocks):
        bases += [base, t.to("b64", "add.s64", base, below)]
        base = t.to("b64", "add.s64", base, block)
    return bases


def _store_swapped(f: Frame, row: str, column: str, accumulators: list[str]) -> None:
    """Store a tile whose columns are rows of the output; lanes 4 apart store adjacent elements."""
    t, config, numbers = f.text, f.config, f.arguments
    size = BYTES[f.variant.outdtype]
    base, stride, eight = _base(f, column, row), _stride(f, 1), _stride(f, UNIT_B)
    steps = [SIDE * at + low for at in range(config.blocks) for low in (0, BELOW)]
    rows = _sooner(f, row, numbers["rows_a"], steps)
    bias = _bias_at(f, row) if f.variant.bias else ""
    added = [_bias(f, bias, step, inside) for step, inside in zip(steps, rows, strict=True)] if bias else []
    for first in range(0, config.tile_b, UNIT_B):
        inside = _sooner(f, column, numbers["rows_b"], [first, first + 1])
        lines = base, t.to("b64", "add.s64", base, stride)
        for index, step in enumerate(steps):
            begin = index // 2 * config.accumulators_per_block + first // 2 + 2 * (index % 2)
            for odd in (0, 1):
                value = accumulators[begin + odd]
                value = t.to("f32", "add.rn.f32", value, added[index]) if bias else value
                when = t.to("pred", "and.pred", rows[index], inside[odd])
                _put(f, f"[{lines[odd]}+{step * size}]", value, when)
        base = t.to("b64", "add.s64", base, eight)
