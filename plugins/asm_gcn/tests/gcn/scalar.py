"""Execute scalar instructions: arithmetic, comparisons, branches, masks and wave control."""

from __future__ import annotations

from collections.abc import Callable

from .fault import Fault
from .operands import Bound, keys_of, register_of, unsupported
from .text import Instruction, Number, Operand, Register
from .wave import ALL, EXEC, VCC, Wave

_WORD = 0xFFFFFFFF
Value = Callable[[Wave], int]


def _signed(value: int, width: int = 32) -> int:
    return value - ((value & (1 << (width - 1))) << 1)


def value_of(operand: Operand, width: int = 32) -> Value:
    """Return a scalar source as an unsigned integer of 32 or 64 bits."""
    if isinstance(operand, Number):
        constant = operand.bits(width)
        return lambda wave: constant
    if isinstance(operand, Register) and operand.file == "s":
        key = operand.first
        if width == 64:
            if operand.count != 2:
                raise Fault("operand", f"{operand} must be two registers")
            return lambda wave: wave.get64(key)
        return lambda wave: wave.get(key)
    raise Fault("operand", f"{operand} is no scalar source")


def _added(a: int, b: int, _c: int) -> tuple[int, int]:
    return a + b, (a + b) >> 32


def _overflow(result: int) -> int:
    return int(not -(1 << 31) <= result < 1 << 31)


def _add_signed(a: int, b: int, _c: int) -> tuple[int, int]:
    total = _signed(a) + _signed(b)
    return total, _overflow(total)


def _subtract_signed(a: int, b: int, _c: int) -> tuple[int, int]:
    total = _signed(a) - _signed(b)
    return total, _overflow(total)


def _any(value: int) -> tuple[int, int]:
    return value, int(value != 0)


def _field(value: int, packed: int, width: int, *, signed: bool = False) -> tuple[int, int]:
    """Execute s_bfe: bits 4:0 of the second source are the offset, 22:16 the width."""
    start, bits = packed & (width - 1), (packed >> 16) & 0x7F
    found = (value >> start) & ((1 << bits) - 1)
    if signed and bits:
        found = _signed(found, bits) & ((1 << width) - 1)
    return _any(found)


#: Two sources -> result and SCC (None keeps it); the third argument is SCC.  The number is the
#: width of sources and result.
BINARY: dict[str, tuple[int, Callable[[int, int, int], tuple[int, int | None]]]] = {
    "s_add_u32": (32, _added),
    "s_addc_u32": (32, lambda a, b, c: (a + b + c, (a + b + c) >> 32)),
    "s_sub_u32": (32, lambda a, b, c: (a - b, int(a < b))),
    "s_subb_u32": (32, lambda a, b, c: (a - b - c, int(a < b + c))),
    "s_add_i32": (32, _add_signed),
    "s_sub_i32": (32, _subtract_signed),
    "s_mul_i32": (32, lambda a, b, c: (a * b, None)),
    "s_mul_hi_u32": (32, lambda a, b, c: ((a * b) >> 32, None)),
    "s_mul_hi_i32": (32, lambda a, b, c: ((_signed(a) * _signed(b)) >> 32, None)),
    "s_min_i32": (32, lambda a, b, c: (min(_signed(a), _signed(b)), int(_signed(a) < _signed(b)))),
    "s_max_i32": (32, lambda a, b, c: (max(_signed(a), _signed(b)), int(_signed(a) > _signed(b)))),
    "s_min_u32": (32, lambda a, b, c: (min(a, b), int(a < b))),
    "s_max_u32": (32, lambda a, b, c: (max(a, b), int(a > b))),
    "s_lshl_b32": (32, lambda a, b, c: _any((a << (b & 31)) & _WORD)),
    "s_lshr_b32": (32, lambda a, b, c: _any(a >> (b & 31))),
    "s_ashr_i32": (32, lambda a, b, c: _any((_signed(a) >> (b & 31)) & _WORD)),
    "s_lshl1_add_u32": (32, lambda a, b, c: ((a << 1) + b, int((a << 1) + b > _WORD))),
    "s_lshl2_add_u32": (32, lambda a, b, c: ((a << 2) + b, int((a << 2) + b > _WORD))),
    "s_lshl3_add_u32": (32, lambda a, b, c: ((a << 3) + b, int((a << 3) + b > _WORD))),
    "s_lshl4_add_u32": (32, lambda a, b, c: ((a << 4) + b, int((a << 4) + b > _WORD))),
    "s_bfe_u32": (32, lambda a, b, c: _field(a, b, 32)),
    "s_bfe_i32": (32, lambda a, b, c: _field(a, b, 32, signed=True)),
    "s_bfm_b32": (32, lambda a, b, c: (((1 << (a & 31)) - 1) << (b & 31), None)),
    "s_pack_ll_b32_b16": (32, lambda a, b, c: ((a & 0xFFFF) | ((b & 0xFFFF) << 16), None)),
    "s_pack_lh_b32_b16": (32, lambda a, b, c: ((a & 0xFFFF) | (b & 0xFFFF0000), None)),
    "s_pack_hh_b32_b16": (32, lambda a, b, c: ((a >> 16) | (b & 0xFFFF0000), None)),
    "s_cselect_b32": (32, lambda a, b, c: (a if c else b, None)),
    "s_cselect_b64": (64, lambda a, b, c: (a if c else b, None)),
} | {
    f"s_{name}_b{width}": (width, lambda a, b, c, function=function, mask=(1 << width) - 1: _any(function(a, b) & mask))  # type: ignore[misc]
    for width in (32, 64)
    for name, function in {
        "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "andn2": lambda a, b: a & ~b,
        "orn2": lambda a, b: a | ~b, "nand": lambda a, b: ~(a & b), "nor": lambda a, b: ~(a | b), "xnor": lambda a, b: ~(a ^ b),
    }.items()
}  # fmt: skip

#: Shifts of 64 bits, whose second source has 32.
SHIFTS = {
    "s_lshl_b64": lambda a, b: (a << (b & 63)) & ALL,
    "s_lshr_b64": lambda a, b: a >> (b & 63),
    "s_ashr_i64": lambda a, b: (_signed(a, 64) >> (b & 63)) & ALL,
    "s_bfe_u64": lambda a, b: _field(a, b, 64)[0],
}

#: One source -> result and SCC; widths of the source and of the result.
UNARY: dict[str, tuple[int, int, Callable[[int], tuple[int, int | None]]]] = {
    "s_mov_b32": (32, 32, lambda a: (a, None)),
    "s_mov_b64": (64, 64, lambda a: (a, None)),
    "s_not_b32": (32, 32, lambda a: _any(~a & _WORD)),
    "s_not_b64": (64, 64, lambda a: _any(~a & ALL)),
    "s_brev_b32": (32, 32, lambda a: (int(f"{a:032b}"[::-1], 2), None)),
    "s_bcnt1_i32_b32": (32, 32, lambda a: _any(a.bit_count())),
    "s_bcnt1_i32_b64": (64, 32, lambda a: _any(a.bit_count())),
    "s_ff1_i32_b32": (32, 32, lambda a: ((a & -a).bit_length() - 1, None)),
    "s_ff1_i32_b64": (64, 32, lambda a: ((a & -a).bit_length() - 1, None)),
    "s_flbit_i32_b32": (32, 32, lambda a: (32 - a.bit_length() if a else -1, None)),
    "s_sext_i32_i8": (32, 32, lambda a: (_signed(a & 0xFF, 8), None)),
    "s_sext_i32_i16": (32, 32, lambda a: (_signed(a & 0xFFFF, 16), None)),
    "s_abs_i32": (32, 32, lambda a: _any(abs(_signed(a)))),
}

_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b, "lg": lambda a, b: a != b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
}  # fmt: skip

#: Instructions that change nothing that a program can see here.
IDLE = {
    "s_setprio", "s_sleep", "s_sethalt", "s_icache_inv", "s_dcache_wb", "s_inst_prefetch", "s_ttracedata", "s_incperflevel",
    "s_decperflevel", "s_setreg_imm32_b32", "s_setreg_b32",
}  # fmt: skip


def bind(instruction: Instruction) -> Bound | None:
    """Return an executable scalar instruction, or None."""
    name = instruction.mnemonic
    if not name.startswith("s_") or name.startswith(("s_load", "s_store", "s_buffer", "s_atomic", "s_waitcnt", "s_barrier")):
        return None
    if instruction.modifiers:
        raise unsupported(instruction, ", ".join(instruction.modifiers))
    if name in BINARY:
        return _binary(instruction, *BINARY[name])
    if name in SHIFTS:
        return _shift(instruction)
    if name in UNARY:
        return _unary(instruction, *UNARY[name])
    for maker in (_comparison, _immediate, _masking, _branch, _steering):
        bound = maker(instruction)
        if bound:
            return bound
    raise unsupported(instruction)


def _destination(instruction: Instruction, width: int) -> tuple[Register, Callable[[Wave, int], None]]:
    register = register_of(instruction, 0, "s")
    if register.count != width // 32:
        raise Fault("operand", f"{instruction}: {register} must be of {width} bits")
    key = register.first
    if width == 64:
        return register, lambda wave, value: wave.put64(key, value)
    return register, lambda wave, value: wave.put(key, value)


def _condition(wave: Wave) -> int:
    if wave.scc is None:
        raise Fault("undefined", "SCC was never written")
    return wave.scc


def _binary(instruction: Instruction, width: int, function: Callable[[int, int, int], tuple[int, int | None]]) -> Bound:
    register, put = _destination(instruction, width)
    first, second = (value_of(operand, width) for operand in instruction.operands[1:3])
    uses = instruction.mnemonic.startswith(("s_addc", "s_subb_", "s_cselect"))

    def run(wave: Wave) -> None:
        result, condition = function(first(wave), second(wave), _condition(wave) if uses else 0)
        put(wave, result)
        if condition is not None:
            wave.scc = condition

    return Bound(instruction, run, "salu", keys_of(*instruction.operands[1:3]), register.keys)


def _shift(instruction: Instruction) -> Bound:
    function = SHIFTS[instruction.mnemonic]
    register, put = _destination(instruction, 64)
    first, second = value_of(instruction.operands[1], 64), value_of(instruction.operands[2])

    def run(wave: Wave) -> None:
        result = function(first(wave), second(wave))
        put(wave, result)
        wave.scc = int(result != 0)

    return Bound(instruction, run, "salu", keys_of(*instruction.operands[1:3]), register.keys)


def _unary(instruction: Instruction, width: int, out: int, function: Callable[[int], tuple[int, int | None]]) -> Bound:
    register, put = _destination(instruction, out)
    value = value_of(instruction.operands[1], width)

    def run(wave: Wave) -> None:
        result, condition = function(value(wave))
        put(wave, result)
        if condition is not None:
            wave.scc = condition

    return Bound(instruction, run, "salu", keys_of(instruction.operands[1]), register.keys)


def _comparison(instruction: Instruction) -> Bound | None:
    """Execute s_cmp, s_cmpk and s_bitcmp, which write SCC."""
    words = instruction.mnemonic.split("_")
    if words[1] in ("bitcmp0", "bitcmp1"):
        first, second = (value_of(operand, 64 if at == 0 and words[2] == "b64" else 32) for at, operand in enumerate(instruction.operands))
        wanted, limit = int(words[1][-1]), 63 if words[2] == "b64" else 31
        test: Callable[[Wave], bool] = lambda wave: (first(wave) >> (second(wave) & limit) & 1) == wanted  # noqa: E731
    elif words[1] in ("cmp", "cmpk") and len(words) == 4 and words[2] in _COMPARISONS:
        width = int(words[3][1:])
        first, second = (value_of(operand, width) for operand in instruction.operands)
        function = _COMPARISONS[words[2]]
        if words[3] == "i32":
            test = lambda wave: function(_signed(first(wave)), _signed(second(wave)))  # noqa: E731
        else:
            test = lambda wave: function(first(wave), second(wave))  # noqa: E731
    else:
        return None

    def run(wave: Wave) -> None:
        wave.scc = int(test(wave))

    return Bound(instruction, run, "salu", keys_of(*instruction.operands))


def _immediate(instruction: Instruction) -> Bound | None:
    """Execute s_movk_i32, s_addk_i32, s_mulk_i32 and s_cmovk with a sign-extended constant."""
    name = instruction.mnemonic
    if name not in ("s_movk_i32", "s_addk_i32", "s_mulk_i32", "s_cmov_b32", "s_cmov_b64", "s_cmovk_i32"):
        return None
    width = 64 if name.endswith("b64") else 32
    register, put = _destination(instruction, width)
    operand = instruction.operands[1]
    if name.endswith("k_i32") and isinstance(operand, Number):
        operand = Number(_signed(int(operand.value) & 0xFFFF, 16))
    value = value_of(operand, width)
    keys = register.keys

    def run(wave: Wave) -> None:
        if name == "s_movk_i32":
            put(wave, value(wave))
        elif name == "s_addk_i32":
            total = _signed(wave.get(register.first)) + _signed(value(wave))
            put(wave, total)
            wave.scc = _overflow(total)
        elif name == "s_mulk_i32":
            put(wave, wave.get(register.first) * value(wave))
        elif _condition(wave):
            put(wave, value(wave))

    reads = keys_of(operand) + (keys if name in ("s_addk_i32", "s_mulk_i32") else ())
    return Bound(instruction, run, "salu", reads, keys)


def _masking(instruction: Instruction) -> Bound | None:
    """Execute s_and_saveexec_b64 and related instructions."""
    function = {
        "s_and_saveexec_b64": lambda a, e: a & e, "s_or_saveexec_b64": lambda a, e: a | e, "s_xor_saveexec_b64": lambda a, e: a ^ e,
        "s_andn2_saveexec_b64": lambda a, e: a & ~e, "s_andn1_saveexec_b64": lambda a, e: ~a & e,
    }.get(instruction.mnemonic)  # fmt: skip
    if function is None:
        return None
    register, put = _destination(instruction, 64)
    value = value_of(instruction.operands[1], 64)

    def run(wave: Wave) -> None:
        old, given = wave.get64(EXEC), value(wave)
        put(wave, old)
        result = function(given, old) & ALL
        wave.put64(EXEC, result)
        wave.scc = int(result != 0)

    execs = (EXEC, EXEC + 1)
    return Bound(instruction, run, "salu", keys_of(instruction.operands[1]) + execs, register.keys + execs)


def _branch(instruction: Instruction) -> Bound | None:
    tests: dict[str, tuple[Callable[[Wave], bool], tuple[int, ...]]] = {
        "s_branch": (lambda wave: True, ()),
        "s_cbranch_scc0": (lambda wave: not _condition(wave), ()),
        "s_cbranch_scc1": (lambda wave: bool(_condition(wave)), ()),
        "s_cbranch_vccz": (lambda wave: wave.get64(VCC) == 0, (VCC, VCC + 1)),
        "s_cbranch_vccnz": (lambda wave: wave.get64(VCC) != 0, (VCC, VCC + 1)),
        "s_cbranch_execz": (lambda wave: wave.get64(EXEC) == 0, (EXEC, EXEC + 1)),
        "s_cbranch_execnz": (lambda wave: wave.get64(EXEC) != 0, (EXEC, EXEC + 1)),
    }
    if instruction.mnemonic not in tests:
        return None
    test, reads = tests[instruction.mnemonic]
    to = instruction.target
    if to < 0:
        raise Fault("syntax", f"{instruction}: goes to no instruction")

    def run(wave: Wave) -> None:
        if test(wave):
            wave.pc = to - 1

    return Bound(instruction, run, "control", reads)


def _steering(instruction: Instruction) -> Bound | None:
    name = instruction.mnemonic
    if name == "s_nop":
        count = instruction.operands[0]
        if not isinstance(count, Number) or not 0 <= count.value <= 15:
            raise Fault("operand", f"{instruction}: 0 to 15")
        more = int(count.value)

        def idle(wave: Wave) -> None:
            wave.time += more

        return Bound(instruction, idle, "control")
    if name == "s_endpgm":

        def end(wave: Wave) -> None:
            wave.ended = True

        return Bound(instruction, end, "control")
    if name == "s_dcache_inv":

        def fresh(wave: Wave) -> None:
            wave.scalar_invalidated = wave.group.memory.time

        return Bound(instruction, fresh, "control")
    if name in IDLE:
        return Bound(instruction, lambda wave: None, "control", keys_of(*instruction.operands))
    return None
