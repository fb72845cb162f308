"""Execute vector instructions: those of the table, and those on masks, lanes or scalars."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .fault import Fault
from .operands import DTYPES, Bound, keys_of, lane_move, mask_source, part, register_of, source, target, unsupported, word
from .text import VECTOR, Instruction, Number, Operand, Register
from .vector_table import COMPARED, COMPARISONS, GFX950, TABLE, TRANSCENDENTAL
from .wave import EXEC, LANES, VCC, Wave, lanes_of, mask_of

_COMPARE = re.compile(r"^v_cmp(x?)_([a-z]+)_([a-z]\d+)$")
#: Modifiers without a meaning here, or read by their instruction.
_KNOWN = {
    "dst_sel", "dst_unused", "src0_sel", "src1_sel", "quad_perm", "row_shr", "row_shl", "row_ror", "row_newbcast", "row_bcast", "row_mask",
    "bank_mask", "bound_ctrl", "op_sel", "op_sel_hi", "neg_lo", "neg_hi", "clamp", "mul", "div", "bitop3",
}  # fmt: skip


def bind(instruction: Instruction, gfx: str) -> Bound | None:
    """Return an executable vector instruction, or None."""
    name = instruction.mnemonic
    if not name.startswith("v_") or name.startswith(("v_mfma", "v_smfma")):
        return None
    strange = set(instruction.modifiers) - _KNOWN
    if strange or (name in GFX950 and gfx != "gfx950"):
        raise unsupported(instruction, ", ".join(strange) or f"not on {gfx}")
    special = SPECIAL.get(name)
    if special:
        return special(instruction, gfx)
    if name in TABLE:
        return _table(instruction)
    if _COMPARE.match(name):
        return _compare(instruction)
    raise unsupported(instruction)


def _moved(instruction: Instruction) -> tuple[Callable[[Wave, Any], Any] | None, Callable[[Wave], np.ndarray] | None]:
    """Return DPP's source lanes and write mask, or None."""
    if "dpp" not in instruction.encoding:
        return None, None
    lane, there = lane_move(instruction)
    zero = "bound_ctrl" in instruction.modifiers
    rows, banks = instruction.modifiers.get("row_mask", 15), instruction.modifiers.get("bank_mask", 15)
    number = np.arange(LANES)
    enabled = ((rows >> (number >> 4)) & 1).astype(bool) & ((banks >> ((number >> 2) & 3)) & 1).astype(bool)

    def move(wave: Wave, value: Any) -> Any:
        whole = np.broadcast_to(value, LANES)
        return np.where(there & wave.lanes[lane], whole[lane], np.uint32(0))

    def lanes(wave: Wave) -> np.ndarray:
        return wave.lanes & enabled & (there & wave.lanes[lane] if not zero else True)

    return move, lanes


def _sources(instruction: Instruction, operands: tuple[Operand, ...], kinds: str) -> list[Any]:
    """Return getters of sources with SDWA and DPP applied."""
    move, _ = _moved(instruction)
    selects = [instruction.modifiers.get(f"src{at}_sel", "DWORD") for at in range(2)] + ["DWORD"] * 2
    picks = instruction.modifiers.get("op_sel", [0] * 4)
    out = []
    for at, (operand, kind) in enumerate(zip(operands, kinds, strict=True)):
        select = selects[at]
        if kind in "HSh" and at < len(picks) and picks[at]:
            select = "WORD_1"
        out.append(source(operand, kind, select, move if at == 0 else None))
    return out


def _put(instruction: Instruction, register: Register, kind: str) -> tuple[Callable[[Wave, Any], None], bool]:
    """Return the writer of a result, and whether it writes a part."""
    how, unused = instruction.modifiers.get("dst_sel", "DWORD"), instruction.modifiers.get("dst_unused", "UNUSED_PAD")
    if "clamp" in instruction.modifiers or "mul" in instruction.modifiers or "div" in instruction.modifiers:
        return _scaled(instruction, register, kind), False
    picks = instruction.modifiers.get("op_sel")
    if kind in "HSh" and picks and picks[-1] and instruction.mnemonic != "v_pack_b32_f16":
        high = part(register, "WORD_1", "UNUSED_PRESERVE")
        return lambda wave, value: high(wave, np.asarray(value, DTYPES[kind]).view(np.uint16)), True
    if how != "DWORD":
        partly = part(register, how, unused)
        return lambda wave, value: partly(wave, np.asarray(value, DTYPES[kind]).view(np.uint32 if kind in "uif" else np.uint16)), True
    _, lanes = _moved(instruction)
    if lanes is None:
        return target(register, kind), False
    key = register.key()
    return lambda wave, value: wave.write(key, np.asarray(value, DTYPES[kind]).view(np.uint32), lanes(wave)), False


def _scaled(instruction: Instruction, register: Register, kind: str) -> Callable[[Wave, Any], None]:
    """Scale a float result by a power of two and clamp it."""
    if kind != "f":
        raise unsupported(instruction, "clamp of an integer")
    scale = np.float32(instruction.modifiers.get("mul", 1) / instruction.modifiers.get("div", 1))
    clamp = "clamp" in instruction.modifiers
    write = target(register, kind)
    return lambda wave, value: write(wave, np.clip(np.nan_to_num(value * scale), 0, 1) if clamp else value * scale)


def _flags(instruction: Instruction, partly: bool) -> frozenset[str]:
    return frozenset(["dpp"] * ("dpp" in instruction.encoding) + ["part"] * partly)


def _table(instruction: Instruction) -> Bound:
    kinds, result, function = TABLE[instruction.mnemonic]
    register = register_of(instruction, 0)
    operands = instruction.operands[1:]
    if len(operands) != len(kinds):
        raise Fault("operand", f"{instruction}: {len(kinds)} sources")
    gets = _sources(instruction, operands, kinds)
    write, partly = _put(instruction, register, result)
    reads = keys_of(*operands)
    if instruction.modifiers.get("dst_unused") == "UNUSED_PRESERVE" or "dpp" in instruction.encoding:
        reads += register.keys if partly else ()

    if len(gets) == 1:
        (only,) = gets
        run = lambda wave: write(wave, function(only(wave)))  # noqa: E731
    elif len(gets) == 2:
        first, second = gets
        run = lambda wave: write(wave, function(first(wave), second(wave)))  # noqa: E731
    else:
        run = lambda wave: write(wave, function(*[get(wave) for get in gets]))  # noqa: E731
    kind = "trans" if instruction.mnemonic in TRANSCENDENTAL else "valu"
    return Bound(instruction, run, kind, reads, register.keys, _flags(instruction, partly))


def _scalar_pair(instruction: Instruction, at: int) -> Register:
    register = register_of(instruction, at, "s")
    if register.count != 2:
        raise Fault("operand", f"{instruction}: operand {at} must be two scalar registers")
    return register


def _compare(instruction: Instruction) -> Bound:
    found = _COMPARE.match(instruction.mnemonic)
    assert found
    to_exec, how, of = found.groups()
    if how not in COMPARISONS or of not in COMPARED:
        raise unsupported(instruction)
    register = _scalar_pair(instruction, 0)
    operands = instruction.operands[1:3]
    first, second = _sources(instruction, operands, COMPARED[of] * 2)
    function = COMPARISONS[how]

    def run(wave: Wave) -> None:
        mask = mask_of(np.broadcast_to(function(first(wave), second(wave)), LANES) & wave.lanes)
        wave.put64(register.first, mask)
        if to_exec:
            wave.put64(EXEC, mask)

    writes = register.keys + ((EXEC, EXEC + 1) if to_exec else ())
    return Bound(instruction, run, "valu", keys_of(*operands), writes, _flags(instruction, False))


def _select(instruction: Instruction, _gfx: str) -> Bound:
    """Execute v_cndmask_b32."""
    register = register_of(instruction, 0)
    first, second = _sources(instruction, instruction.operands[1:3], "uu")
    chooser = instruction.operands[3] if len(instruction.operands) > 3 else Register("s", VCC, 2)
    mask = mask_source(chooser)
    write, partly = _put(instruction, register, "u")
    run = lambda wave: write(wave, np.where(lanes_of(mask(wave)), second(wave), first(wave)))  # noqa: E731
    return Bound(instruction, run, "valu", keys_of(*instruction.operands[1:3], chooser), register.keys, _flags(instruction, partly))


def _carry(instruction: Instruction, _gfx: str) -> Bound:
    """Execute additions and subtractions with carry."""
    name = instruction.mnemonic
    register, carry_out = register_of(instruction, 0), _scalar_pair(instruction, 1)
    operands = instruction.operands[2:4]
    carried = "addc" in name or "subb" in name
    carry_in = instruction.operands[4] if carried else None
    first, second = _sources(instruction, operands, "uu")
    if "rev" in name:
        first, second = second, first
    incoming = mask_source(carry_in) if carry_in is not None else lambda wave: 0
    sign = -1 if "sub" in name else 1
    key = register.key()

    def run(wave: Wave) -> None:
        total = np.asarray(first(wave)).astype(np.int64) + sign * (np.asarray(second(wave)).astype(np.int64) + lanes_of(incoming(wave)))
        total = np.broadcast_to(total, LANES)
        wave.write(key, (total & 0xFFFFFFFF).astype(np.uint32))
        wave.put64(carry_out.first, mask_of(((total >> 32) != 0) & wave.lanes))

    return Bound(instruction, run, "valu", keys_of(*operands, carry_in), register.keys + carry_out.keys)


def _multiply_wide(instruction: Instruction, _gfx: str) -> Bound:
    """Execute v_mad_u64_u32 and v_mad_i64_i32."""
    register, carry_out = register_of(instruction, 0), _scalar_pair(instruction, 1)
    signed = instruction.mnemonic == "v_mad_i64_i32"
    operands = instruction.operands[2:5]
    first, second, third = _sources(instruction, operands, "iiI" if signed else "uuU")
    write = target(register, "U")

    def run(wave: Wave) -> None:
        dtype = np.int64 if signed else np.uint64
        product = np.asarray(first(wave)).astype(dtype) * np.asarray(second(wave)).astype(dtype)
        total = np.broadcast_to(product + third(wave), LANES).view(np.uint64)
        write(wave, total)
        wave.put64(carry_out.first, mask_of((total < np.broadcast_to(product, LANES).view(np.uint64)) & wave.lanes))

    return Bound(instruction, run, "valu", keys_of(*operands), register.keys + carry_out.keys)


def _accumulate(instruction: Instruction, _gfx: str) -> Bound:
    """Execute v_fmac_f32, v_fmamk_f32 and v_fmaak_f32."""
    register = register_of(instruction, 0)
    name = instruction.mnemonic
    operands = instruction.operands[1:]
    if name in ("v_fmac_f32", "v_mac_f32"):
        operands = (*operands, register)
    elif name == "v_fmamk_f32":
        pass
    first, second, third = _sources(instruction, operands, "fff")
    fused = TABLE["v_fma_f32"][2]
    write, _ = _put(instruction, register, "f")
    run = lambda wave: write(wave, fused(first(wave), second(wave), third(wave)))  # noqa: E731
    return Bound(instruction, run, "valu", keys_of(*operands), register.keys, _flags(instruction, False))


def _count_below(instruction: Instruction, _gfx: str) -> Bound:
    """Execute v_mbcnt: count mask bits below each lane."""
    register = register_of(instruction, 0)
    high = "hi" in instruction.mnemonic
    first, second = _sources(instruction, instruction.operands[1:3], "uu")
    below = np.asarray([(1 << lane) - 1 for lane in range(LANES)], np.uint64)
    part_of = ((below >> np.uint64(32)) if high else below & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    write = target(register, "u")
    run = lambda wave: write(wave, TABLE["v_bcnt_u32_b32"][2](np.broadcast_to(first(wave), LANES) & part_of, second(wave)))  # noqa: E731
    return Bound(instruction, run, "valu", keys_of(*instruction.operands[1:3]), register.keys)


def _read_first(instruction: Instruction, _gfx: str) -> Bound:
    register, value = register_of(instruction, 0, "s"), word(instruction.operands[1])

    def run(wave: Wave) -> None:
        lane = int(np.argmax(wave.lanes))
        wave.put(register.first, int(np.broadcast_to(value(wave), LANES)[lane]))

    return Bound(instruction, run, "valu", keys_of(instruction.operands[1]), register.keys, frozenset(["readlane"]))


def _read_lane(instruction: Instruction, _gfx: str) -> Bound:
    register, vector, chooser = register_of(instruction, 0, "s"), register_of(instruction, 1, "va"), instruction.operands[2]
    lane = word(chooser)

    def run(wave: Wave) -> None:
        at = int(lane(wave)) & 63
        wave.check(vector.key(), np.arange(LANES) == at)
        wave.put(register.first, int(wave.v[vector.key() - VECTOR, at]))

    flags = frozenset(["readlane", "lane"])
    return Bound(instruction, run, "valu", keys_of(vector, chooser), register.keys, flags, select=keys_of(chooser))


def _write_lane(instruction: Instruction, _gfx: str) -> Bound:
    register, chooser = register_of(instruction, 0), instruction.operands[2]
    value, lane = word(instruction.operands[1]), word(chooser)
    run = lambda wave: wave.write(register.key(), value(wave), np.arange(LANES) == (int(lane(wave)) & 63))  # noqa: E731
    return Bound(instruction, run, "valu", keys_of(*instruction.operands[1:]), register.keys, frozenset(["lane"]), select=keys_of(chooser))


def _accumulator(instruction: Instruction, _gfx: str) -> Bound:
    """Execute v_accvgpr_read, _write and _mov."""
    name = instruction.mnemonic
    register = register_of(instruction, 0, "v" if "read" in name else "a")
    operand = instruction.operands[1]
    if "write" not in name and not (isinstance(operand, Register) and operand.file == "a"):
        raise Fault("operand", f"{instruction}: operand 1 must be an accumulation register")
    if "write" in name and isinstance(operand, Number) and operand.value != int(operand.value):
        raise unsupported(instruction)
    value = word(operand)
    run = lambda wave: wave.write(register.key(), value(wave))  # noqa: E731
    return Bound(instruction, run, "valu", keys_of(operand), register.keys)


def _swap(instruction: Instruction, _gfx: str) -> Bound:
    first, second = register_of(instruction, 0), register_of(instruction, 1)
    one, other = word(first), word(second)

    def run(wave: Wave) -> None:
        kept, new = one(wave).copy(), other(wave).copy()
        wave.write(first.key(), new)
        wave.write(second.key(), kept)

    keys = first.keys + second.keys
    return Bound(instruction, run, "valu", keys, keys)


def _swap_rows(instruction: Instruction, gfx: str) -> Bound:
    """Execute v_permlane32_swap and v_permlane16_swap of gfx950."""
    if gfx != "gfx950":
        raise unsupported(instruction, f"not on {gfx}")
    first, second = register_of(instruction, 0), register_of(instruction, 1)
    width = 32 if "permlane32" in instruction.mnemonic else 16
    one, other = word(first), word(second)
    shape = (LANES // (2 * width), 2, width)

    def run(wave: Wave) -> None:
        if not wave.all_lanes:
            raise unsupported(instruction, "with lanes that are off")
        above, below = one(wave).reshape(shape).copy(), other(wave).reshape(shape).copy()
        above[:, 1], below[:, 0] = below[:, 0].copy(), above[:, 1].copy()
        wave.write(first.key(), above.reshape(-1))
        wave.write(second.key(), below.reshape(-1))

    keys = first.keys + second.keys
    return Bound(instruction, run, "valu", keys, keys, frozenset(["permlane"]))


def _any_function(instruction: Instruction, gfx: str) -> Bound:
    """Execute v_bitop3_b32 of gfx950: bit 4a+2b+c of the constant is the result."""
    if gfx != "gfx950":
        raise unsupported(instruction, f"not on {gfx}")
    register = register_of(instruction, 0)
    gets = _sources(instruction, instruction.operands[1:4], "uuu")
    table = int(instruction.modifiers.get("bitop3", 0))
    write = target(register, "u")

    def run(wave: Wave) -> None:
        bits = [np.broadcast_to(get(wave), LANES) for get in gets]
        out = np.zeros(LANES, np.uint32)
        for row in range(8):
            if table >> row & 1:
                term = [value if row >> (2 - at) & 1 else ~value for at, value in enumerate(bits)]
                out |= term[0] & term[1] & term[2]
        write(wave, out)

    return Bound(instruction, run, "valu", keys_of(*instruction.operands[1:4]), register.keys)


def _packed(instruction: Instruction, _gfx: str) -> Bound:
    """Execute v_pk_add_f32, v_pk_mul_f32, v_pk_fma_f32 and v_pk_mov_b32."""
    register = register_of(instruction, 0)
    if register.count != 2:
        raise Fault("operand", f"{instruction}: two registers")
    operands = instruction.operands[1:]
    lows = instruction.modifiers.get("op_sel", [0] * len(operands))
    highs = instruction.modifiers.get("op_sel_hi", [1] * len(operands))
    negatives = [instruction.modifiers.get(name, [0] * len(operands)) for name in ("neg_lo", "neg_hi")]
    move = instruction.mnemonic == "v_pk_mov_b32"
    function = {"add": lambda a, b: a + b, "mul": lambda a, b: a * b, "fma": TABLE["v_fma_f32"][2]}.get(instruction.mnemonic.split("_")[2])

    def pick(operand: Operand, which: int) -> Any:
        single = isinstance(operand, Number) or (isinstance(operand, Register) and operand.count == 1)
        return word(operand, 0 if single else which)

    halves = [[pick(operand, side[at]) for at, operand in enumerate(operands)] for side in (lows, highs)]

    def run(wave: Wave) -> None:
        results = []
        for side in (0, 1):
            if move:
                results.append(np.array(np.broadcast_to(halves[side][side](wave), LANES)))
                continue
            values = [get(wave).view(np.float32) * np.float32(1 - 2 * negatives[side][at]) for at, get in enumerate(halves[side])]
            results.append(np.asarray(function(*values), np.float32).view(np.uint32))
        wave.write(register.key(0), results[0])
        wave.write(register.key(1), results[1])

    return Bound(instruction, run, "valu", keys_of(*operands), register.keys)


def _nothing(instruction: Instruction, _gfx: str) -> Bound:
    return Bound(instruction, lambda wave: None, "valu")


SPECIAL: dict[str, Callable[[Instruction, str], Bound]] = {
    "v_nop": _nothing, "v_cndmask_b32": _select, "v_readfirstlane_b32": _read_first, "v_readlane_b32": _read_lane, "v_swap_b32": _swap,
    "v_writelane_b32": _write_lane, "v_mbcnt_lo_u32_b32": _count_below, "v_mbcnt_hi_u32_b32": _count_below, "v_bitop3_b32": _any_function,
    "v_mad_u64_u32": _multiply_wide, "v_mad_i64_i32": _multiply_wide,
    "v_permlane32_swap_b32": _swap_rows, "v_permlane16_swap_b32": _swap_rows,
    **dict.fromkeys(("v_accvgpr_read_b32", "v_accvgpr_write_b32", "v_accvgpr_mov_b32"), _accumulator),
    **dict.fromkeys(("v_fmac_f32", "v_mac_f32", "v_fmamk_f32", "v_fmaak_f32"), _accumulate),
    **dict.fromkeys(("v_pk_add_f32", "v_pk_mul_f32", "v_pk_fma_f32", "v_pk_mov_b32"), _packed),
    **dict.fromkeys(("v_add_co_u32", "v_sub_co_u32", "v_subrev_co_u32", "v_addc_co_u32", "v_subb_co_u32", "v_subbrev_co_u32"), _carry),
}  # fmt: skip
