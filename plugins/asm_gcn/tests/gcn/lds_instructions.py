"""Execute LDS instructions: reads, writes, atomics and lane exchanges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .fault import Fault
from .operands import Bound, keys_of, register_of, unsupported, word
from .text import VECTOR, Instruction, Register
from .waits import begin
from .wave import LANES, Outstanding, Wave

#: Reads and writes of one place: bytes, and what an address must be a multiple of.
READS = {"ds_read_b32": 4, "ds_read_b64": 8, "ds_read_b96": 12, "ds_read_b128": 16}
WRITES = {
    "ds_write_b32": 4,
    "ds_write_b64": 8,
    "ds_write_b96": 12,
    "ds_write_b128": 16,
    "ds_write_b16": 2,
    "ds_write_b8": 1,
    "ds_write_b16_d16_hi": 2,
}
#: Reads of 8 or 16 bits: bytes, signed, which half of the register (None: all of it).
NARROW: dict[str, tuple[int, bool, int | None]] = {
    "ds_read_u8": (1, False, None), "ds_read_i8": (1, True, None), "ds_read_u16": (2, False, None), "ds_read_i16": (2, True, None),
    "ds_read_u16_d16": (2, False, 0), "ds_read_u16_d16_hi": (2, False, 1),
}  # fmt: skip
#: Pairs: bytes of each, and the unit of the two offsets in those bytes.
PAIRS = {f"ds_{what}2{far}_b{8 * size}": (size, 64 if far else 1) for what in ("read", "write") for size in (4, 8) for far in ("", "st64")}
ATOMICS: dict[str, Callable[[Any, Any], Any]] = {
    "ds_add_u32": lambda old, new: old + new,
    "ds_add_f32": lambda old, new: (old.view(np.float32) + new.view(np.float32)).view(np.uint32),
    "ds_max_u32": np.maximum,
}
_ALIGN = {1: 1, 2: 2, 4: 4, 8: 8, 12: 16, 16: 16}
_KNOWN = {"offset", "offset0", "offset1"}


def bind(instruction: Instruction) -> Bound | None:
    """Return an executable LDS instruction, or None."""
    name = instruction.mnemonic
    if not name.startswith("ds_"):
        return None
    if set(instruction.modifiers) - _KNOWN:
        raise unsupported(instruction, ", ".join(instruction.modifiers))
    if name in READS or name in NARROW:
        return _read(instruction)
    if name in WRITES:
        return _write(instruction)
    if name in PAIRS:
        return _pair(instruction)
    if name in ATOMICS:
        return _atomic(instruction)
    if name in ("ds_bpermute_b32", "ds_permute_b32"):
        return _exchange(instruction)
    if name == "ds_read_b64_tr_b16":
        return _transposed(instruction)
    raise unsupported(instruction)


def _addresses(instruction: Instruction, at: int) -> tuple[Register, Callable[[Wave], np.ndarray]]:
    """Return byte addresses of the active lanes."""
    register = register_of(instruction, at)
    base, offset = word(register), instruction.modifiers.get("offset", 0)
    return register, lambda wave: base(wave)[wave.lanes].astype(np.int64) + offset


def _data(wave: Wave, register: Register, lanes: np.ndarray) -> np.ndarray:
    """Return bytes [active lanes, 4 x registers] of a register."""
    for key in register.keys:
        wave.check(key)
    rows = wave.v[register.key() - VECTOR : register.key() - VECTOR + register.count, lanes]
    return np.ascontiguousarray(rows.T).view(np.uint8)


def deliver(wave: Wave, register: Register, values: np.ndarray, lanes: np.ndarray) -> None:
    """Write bytes [active lanes, 4 x registers] to a register."""
    words = np.ascontiguousarray(values).view(np.uint32)
    for at in range(register.count):
        whole = np.zeros(LANES, np.uint32)
        whole[lanes] = words[:, at]
        wave.write(register.key(at), whole, None if lanes.all() and wave.all_lanes else lanes)


def deliver_narrow(wave: Wave, register: Register, values: np.ndarray, lanes: np.ndarray, how: tuple[int, bool, int | None]) -> None:
    """Write bytes [active lanes, 1 or 2], extended or into half a register."""
    size, signed, half = how
    raw = np.ascontiguousarray(values).view({1: np.uint8, 2: np.uint16}[size]).reshape(-1)
    extended = (raw.view({1: np.int8, 2: np.int16}[size]).astype(np.int32) if signed else raw).astype(np.uint32)
    whole = np.zeros(LANES, np.uint32)
    whole[lanes] = extended
    key = register.key()
    if half is not None:
        # The other half is kept, whatever it holds: a program may fill one half, then the other.
        old = wave.v[key - VECTOR]
        whole = (old & np.uint32(0xFFFF)) | (whole << np.uint32(16)) if half else (old & np.uint32(0xFFFF0000)) | whole
    wave.write(key, whole, lanes)


def _read(instruction: Instruction) -> Bound:
    out = register_of(instruction, 0, "va")
    register, addresses = _addresses(instruction, 1)
    narrow = NARROW.get(instruction.mnemonic)
    size = narrow[0] if narrow else READS[instruction.mnemonic]
    if not narrow and 4 * out.count != size:
        raise Fault("operand", f"{instruction}: {out} must be of {size} bytes")

    def run(wave: Wave) -> None:
        lanes, group = wave.lanes.copy(), wave.group
        values, halves = group.lds.load(addresses(wave), size, wave.number, group.epoch, _ALIGN[size])

        def finish() -> None:
            group.lds.finish_read(halves, wave.number, group.epoch)
            if narrow:
                deliver_narrow(wave, out, values, lanes, narrow)
            else:
                deliver(wave, out, values, lanes)

        begin(wave, Outstanding(instruction, "lds", out.keys, finish))

    reads = register.keys + (out.keys if narrow and narrow[2] is not None else ())
    return Bound(instruction, run, "lds", reads, out.keys)


def _written(wave: Wave, instruction: Instruction, pieces: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Store pieces (addresses, bytes) and complete them when waited for."""
    group = wave.group
    halves = [group.lds.store(to, values, wave.number, group.epoch, _ALIGN[values.shape[1]]) for to, values in pieces]

    def finish() -> None:
        for each in halves:
            group.lds.finish_write(each, group.epoch)

    begin(wave, Outstanding(instruction, "lds", (), finish))


def _write(instruction: Instruction) -> Bound:
    register, addresses = _addresses(instruction, 0)
    data = register_of(instruction, 1, "va")
    size = WRITES[instruction.mnemonic]
    high = instruction.mnemonic.endswith("d16_hi")
    if data.count != (size + 3) // 4:
        raise Fault("operand", f"{instruction}: {data} must be of {size} bytes")

    def run(wave: Wave) -> None:
        values = _data(wave, data, wave.lanes)
        _written(wave, instruction, [(addresses(wave), values[:, 2:4] if high else values[:, :size])])

    return Bound(instruction, run, "lds", keys_of(register, data))


def _pair(instruction: Instruction) -> Bound:
    size, unit = PAIRS[instruction.mnemonic]
    offsets = [instruction.modifiers.get(name, 0) * size * unit for name in ("offset0", "offset1")]
    if instruction.mnemonic.startswith("ds_write"):
        register, addresses = _addresses(instruction, 0)
        data = [register_of(instruction, at, "va") for at in (1, 2)]

        def store(wave: Wave) -> None:
            at = addresses(wave)
            _written(wave, instruction, [(at + offset, _data(wave, each, wave.lanes)) for offset, each in zip(offsets, data, strict=True)])

        return Bound(instruction, store, "lds", keys_of(register, *data))
    out = register_of(instruction, 0, "va")
    register, addresses = _addresses(instruction, 1)
    if 4 * out.count != 2 * size:
        raise Fault("operand", f"{instruction}: {out} must be of {2 * size} bytes")

    def load(wave: Wave) -> None:
        lanes, group, at = wave.lanes.copy(), wave.group, addresses(wave)
        loaded = [group.lds.load(at + offset, size, wave.number, group.epoch, _ALIGN[size]) for offset in offsets]

        def finish() -> None:
            for _, halves in loaded:
                group.lds.finish_read(halves, wave.number, group.epoch)
            deliver(wave, out, np.concatenate([values for values, _ in loaded], axis=1), lanes)

        begin(wave, Outstanding(instruction, "lds", out.keys, finish))

    return Bound(instruction, load, "lds", register.keys, out.keys)


def _atomic(instruction: Instruction) -> Bound:
    """Execute an atomic without result, lane by lane."""
    register, addresses = _addresses(instruction, 0)
    data = register_of(instruction, 1, "va")
    function = ATOMICS[instruction.mnemonic]

    def run(wave: Wave) -> None:
        group = wave.group
        values = _data(wave, data, wave.lanes).view(np.uint32).reshape(-1)
        for address, value in zip(addresses(wave), values, strict=True):
            old = group.lds.data[address : address + 4].view(np.uint32)
            group.lds.places(np.asarray([address]), 4, 4)
            old[:] = function(old.copy(), np.asarray([value]))
        begin(wave, Outstanding(instruction, "lds", (), None))

    return Bound(instruction, run, "lds", keys_of(register, data))


def _exchange(instruction: Instruction) -> Bound:
    """Execute ds_bpermute_b32 or ds_permute_b32."""
    out, where, data = register_of(instruction, 0), register_of(instruction, 1), register_of(instruction, 2)
    offset = instruction.modifiers.get("offset", 0)
    backward = "bpermute" in instruction.mnemonic

    def run(wave: Wave) -> None:
        wave.check(where.key())
        lanes = wave.lanes.copy()
        lane = ((wave.v[where.key() - VECTOR].astype(np.int64) + offset) >> 2) & 63
        given = wave.v[data.key() - VECTOR].copy()
        values = np.zeros(LANES, np.uint32)
        if backward:
            needed = np.zeros(LANES, bool)
            needed[lane[lanes]] = True
            wave.check(data.key(), needed & lanes)
            values = np.where(lanes[lane], given[lane], np.uint32(0))
        else:
            wave.check(data.key())
            values[lane[lanes]] = given[lanes]
        begin(wave, Outstanding(instruction, "lds", out.keys, lambda: wave.write(out.key(), values, lanes)))

    return Bound(instruction, run, "lds", keys_of(where, data), out.keys)


def _transposed(instruction: Instruction) -> Bound:
    raise unsupported(instruction, "the layout of transposed reads was not checked against anything")
