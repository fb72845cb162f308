"""Execute `global_` and `buffer_` instructions, their atomics, scalar memory, and visibility."""

from __future__ import annotations

import re
from collections.abc import Callable

import attrs
import numpy as np

from .fault import Fault
from .lds_instructions import deliver, deliver_narrow
from .memory import Access
from .operands import Bound, keys_of, register_of, unsupported, word
from .text import VECTOR, Instruction, Name, Register
from .vector_table import to_bf16
from .waits import begin
from .wave import LANES, M0, Outstanding, Wave

_ACCESS = re.compile(
    r"^(buffer|global)_(load|store)_(dword|dwordx2|dwordx3|dwordx4|ubyte|sbyte|ushort|sshort|byte|short|short_d16|short_d16_hi)$"
)
_ATOMIC = re.compile(r"^(buffer|global)_atomic_(\w+)$")
_BYTES = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "ubyte": 1, "sbyte": 1, "byte": 1}
#: Loads of less than a register: bytes, signed, and which half they fill.
NARROW: dict[str, tuple[int, bool, int | None]] = {
    "ubyte": (1, False, None), "sbyte": (1, True, None), "ushort": (2, False, None), "sshort": (2, True, None), "short_d16": (2, False, 0),
    "short_d16_hi": (2, False, 1),
}  # fmt: skip
_KNOWN = {"offset", "offen", "lds", "sc0", "sc1", "nt", "glc", "slc"}
#: Bits of a buffer's second and last word that say how addresses are made: neither is known here.
_SWIZZLE, _THREAD = 1 << 31, 1 << 23


def _pair_bf16(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Add two bf16 pairs, rounded to nearest."""
    halves = [((side << np.uint32(16)).view(np.float32), (side & np.uint32(0xFFFF0000)).view(np.float32)) for side in (old, new)]
    low, high = halves[0][0] + halves[1][0], halves[0][1] + halves[1][1]
    return (to_bf16(low) | (to_bf16(high) << np.uint32(16))).astype(np.uint32)


#: Atomics on 32 bits.
ATOMICS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": lambda old, new: old + new,
    "sub": lambda old, new: old - new,
    "and": lambda old, new: old & new,
    "or": lambda old, new: old | new,
    "swap": lambda old, new: new,
    "umax": np.maximum,
    "umin": np.minimum,
    "inc": lambda old, new: np.where(old >= new, np.uint32(0), old + np.uint32(1)),
    "dec": lambda old, new: np.where((old == 0) | (old > new), new, old - np.uint32(1)),
    "add_f32": lambda old, new: (old.view(np.float32) + new.view(np.float32)).view(np.uint32),
    "pk_add_bf16": _pair_bf16,
}


@attrs.frozen
class Place:
    """Addresses of an access: [n] of the lanes in range, among the active lanes."""

    addresses: np.ndarray
    lanes: np.ndarray
    active: np.ndarray


def bind(instruction: Instruction) -> Bound | None:
    """Return an executable global memory instruction, or None."""
    name = instruction.mnemonic
    if name in ("buffer_wbl2", "buffer_inv"):
        return _visibility(instruction)
    if not name.startswith(("buffer_", "global_", "flat_", "scratch_")):
        return None
    if set(instruction.modifiers) - _KNOWN:
        raise unsupported(instruction, ", ".join(set(instruction.modifiers) - _KNOWN))
    found = _ACCESS.match(name)
    if found and "lds" in instruction.modifiers:
        return _copy(instruction, found[3])
    if found:
        return _load(instruction, found[3]) if found[2] == "load" else _store(instruction, found[3])
    found = _ATOMIC.match(name)
    if found and found[2] in ATOMICS:
        return _atomic(instruction, ATOMICS[found[2]])
    raise unsupported(instruction)


def access_of(wave: Wave, *, device: bool = False, scalar: bool = False) -> Access:
    """Return the accessing wave as `memory` needs it."""
    group = wave.group
    return Access(
        group.first_wave + wave.number, group.number, wave.scalar_invalidated if scalar else wave.invalidated, device,
        group.rules.coherence,
    )  # fmt: skip


def _global(instruction: Instruction, at: int) -> tuple[tuple[int, ...], Callable[[Wave, int], list[tuple[int, Place]]]]:
    """Return keys and addresses of a `global_` instruction."""
    register, base = register_of(instruction, at), instruction.operands[-1]
    offset = np.int64(instruction.modifiers.get("offset", 0))
    if isinstance(base, Register):
        if base.file != "s" or base.count != 2 or register.count != 1:
            raise Fault("operand", f"{instruction}: two scalar registers and one vector register")
    elif not (isinstance(base, Name) and base.name == "off") or register.count != 2:
        raise Fault("operand", f"{instruction}: two vector registers")
    low, high = word(register), (word(register, 1) if register.count == 2 else None)

    def places(wave: Wave, size: int) -> list[tuple[int, Place]]:
        start = low(wave).astype(np.uint64)
        if high is not None:
            start = start | (high(wave).astype(np.uint64) << np.uint64(32))
        elif isinstance(base, Register):
            start = start + np.uint64(wave.get64(base.first))
        chosen = (start + offset.astype(np.uint64))[wave.lanes]
        return [(0, Place(chosen, wave.lanes, wave.lanes))]

    return keys_of(register, base), places


def _buffer(instruction: Instruction, at: int) -> tuple[tuple[int, ...], Callable[[Wave, int], list[tuple[int, Place]]]]:
    """Return keys and addresses of a `buffer_` instruction, with its range."""
    index, descriptor = instruction.operands[at], register_of(instruction, at + 1, "s")
    steady = instruction.operands[at + 2]
    offset = instruction.modifiers.get("offset", 0)
    if descriptor.count != 4:
        raise Fault("operand", f"{instruction}: {descriptor} must be 4 registers")
    offen = "offen" in instruction.modifiers
    if offen != isinstance(index, Register):
        raise Fault("operand", f"{instruction}: offen wants a register, and off none")
    if not 0 <= offset < 4096:
        raise Fault("operand", f"{instruction}: the offset has 12 bits")
    lane_offset = word(index) if isinstance(index, Register) else (lambda wave: np.uint32(0))
    scalar = word(steady)

    def places(wave: Wave, size: int) -> list[tuple[int, Place]]:
        words = [wave.get(descriptor.first + each) for each in range(4)]
        base, limit = words[0] | ((words[1] & 0xFFFF) << 32), words[2]
        if words[1] & _SWIZZLE or words[3] & _THREAD:
            raise unsupported(instruction, "a swizzled buffer, or one that adds the number of the lane")
        start = int(scalar(wave))
        if start > limit and wave.group.rules.descriptors:
            raise Fault("bounds", f"the scalar offset {start} is behind num_records {limit}, which the range check takes it off")
        inner = np.broadcast_to(lane_offset(wave), LANES).astype(np.int64) + offset
        out = []
        step = 4 if size > 4 else size
        for at_byte in range(0, size, step):
            inside = wave.lanes & (inner + at_byte + start < limit)
            if step < 4:
                inside &= inner + at_byte + step + start <= limit
            out.append((at_byte, Place((np.uint64(base) + (inner + start + at_byte).astype(np.uint64))[inside], inside, wave.lanes)))
        return out

    return keys_of(index, descriptor, steady), places


def _places(instruction: Instruction, at: int) -> tuple[tuple[int, ...], Callable[[Wave, int], list[tuple[int, Place]]]]:
    if instruction.mnemonic.startswith("buffer_"):
        return _buffer(instruction, at)
    if instruction.mnemonic.startswith("global_"):
        return _global(instruction, at)
    raise unsupported(instruction)


def _whole(places: list[tuple[int, Place]], size: int) -> list[tuple[int, int, Place]]:
    """Return pieces (first byte, bytes, place); one piece where no lane is partly out of range."""
    first = places[0][1]
    if all((place.lanes == first.lanes).all() for _, place in places):
        return [(0, size, first)]
    return [(at, min(4, size), place) for at, place in places]


def _load(instruction: Instruction, what: str) -> Bound:
    out = register_of(instruction, 0, "va")
    keys, find = _places(instruction, 1)
    narrow = NARROW.get(what)
    size = narrow[0] if narrow else _BYTES[what]
    if out.count != (size + 3) // 4:
        raise Fault("operand", f"{instruction}: {out} must be of {size} bytes")
    device = "sc1" in instruction.modifiers

    def run(wave: Wave) -> None:
        pieces = _whole(find(wave, size), size)
        lanes, memory = wave.lanes.copy(), wave.group.memory
        number = np.cumsum(lanes) - 1
        for _, width, place in pieces:
            memory.check(place.addresses, width)
        access = access_of(wave, device=device)

        def finish() -> None:
            values = np.zeros((int(lanes.sum()), size), np.uint8)
            for at, width, place in pieces:
                values[number[place.lanes], at : at + width] = memory.load(place.addresses, width, access)
            if narrow:
                deliver_narrow(wave, out, values, lanes, narrow)
            else:
                deliver(wave, out, values, lanes)

        begin(wave, Outstanding(instruction, "vector", out.keys, finish))

    reads = keys + (out.keys if narrow and narrow[2] is not None else ())
    return Bound(instruction, run, "vmem", reads, out.keys, select=())


def _copy(instruction: Instruction, what: str) -> Bound:
    """Execute a load to LDS, lane by lane after M0; it counts as vector memory."""
    if not instruction.mnemonic.startswith("buffer_load_dword"):
        raise unsupported(instruction)
    keys, find = _places(instruction, 0)
    size, offset = _BYTES[what], instruction.modifiers.get("offset", 0)
    device = "sc1" in instruction.modifiers

    def run(wave: Wave) -> None:
        pieces = _whole(find(wave, size), size)
        lanes, group = wave.lanes.copy(), wave.group
        number = np.cumsum(lanes) - 1
        to = wave.get(M0) + offset + size * np.flatnonzero(lanes)
        for _, width, place in pieces:
            group.memory.check(place.addresses, width)
        access = access_of(wave, device=device)
        halves = group.lds.announce(to, size, wave.number, group.epoch)

        def finish() -> None:
            values = np.zeros((to.size, size), np.uint8)
            for at, width, place in pieces:
                values[number[place.lanes], at : at + width] = group.memory.load(place.addresses, width, access)
            group.lds.arrive(to, values, halves, wave.number, group.epoch)

        begin(wave, Outstanding(instruction, "vector", (), finish))

    return Bound(instruction, run, "vmem", (*keys, M0), (), frozenset(["copy"]))


def _store(instruction: Instruction, what: str) -> Bound:
    buffered = instruction.mnemonic.startswith("buffer_")
    data = register_of(instruction, 0 if buffered else 1, "va")
    keys, find = _places(instruction, 1 if buffered else 0)
    high = what.endswith("d16_hi")
    size = 2 if what.startswith("short") else _BYTES[what]
    if data.count != (size + 3) // 4:
        raise Fault("operand", f"{instruction}: {data} must be of {size} bytes")
    device = "sc1" in instruction.modifiers

    def run(wave: Wave) -> None:
        pieces = _whole(find(wave, size), size)
        memory = wave.group.memory
        for key in data.keys:
            wave.check(key)
        rows = wave.v[data.key() - VECTOR : data.key() - VECTOR + data.count]
        values = np.ascontiguousarray(rows.T).view(np.uint8)[:, 2 if high else 0 :]
        ready = []
        for at, width, place in pieces:
            memory.check(place.addresses, width)
            ready.append((place.addresses, np.ascontiguousarray(values[place.lanes, at : at + width])))

        def finish() -> None:
            access = access_of(wave, device=device)
            for addresses, content in ready:
                memory.store(addresses, content, access)

        begin(wave, Outstanding(instruction, "vector", (), finish))

    # A store of more than 64 bits reads its registers late (`hazards`): sooner with a scalar
    # register as offset.
    flags = frozenset(["wide"] if size > 8 else []) | frozenset(
        ["steady"] if buffered and isinstance(instruction.operands[3], Register) else []
    )
    return Bound(instruction, run, "vmem", keys_of(data) + keys, (), flags, data=data.keys)


def _atomic(instruction: Instruction, function: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Bound:
    """Execute a 32-bit atomic lane by lane; sc0 returns the old value."""
    returning = "sc0" in instruction.modifiers
    buffered = instruction.mnemonic.startswith("buffer_")
    out = register_of(instruction, 0) if returning and not buffered else None
    where = (1 if out else 0) if not buffered else 1
    data = register_of(instruction, 0 if buffered else where + 1, "va")
    keys, find = _places(instruction, where)
    result = data if returning and buffered else out

    def run(wave: Wave) -> None:
        ((_, place),) = find(wave, 4)
        memory = wave.group.memory
        wave.check(data.key())
        memory.check(place.addresses, 4)
        if (place.addresses % np.uint64(4)).any():
            raise Fault("alignment", "an atomic wants a multiple of 4")
        values = wave.v[data.key() - VECTOR, place.lanes].copy()
        lanes = place.lanes.copy()
        since = memory.time

        def finish() -> None:
            access = access_of(wave, device=True)
            old = np.zeros(LANES, np.uint32)
            for lane, address, value in zip(np.flatnonzero(lanes), place.addresses, values, strict=True):
                before = memory.load(np.asarray([address]), 4, access, atomic=True).view(np.uint32).reshape(1)
                after = np.asarray(function(before.copy(), np.asarray([value], np.uint32)), np.uint32)
                memory.store(np.asarray([address]), after.view(np.uint8).reshape(1, 4), access, atomic=True)
                old[lane] = before[0]
            if values.size == 1:  # one lane counts for a workgroup; many add up data
                memory.synchronise(int(place.addresses[0]), access, since)
            if result:
                wave.write(result.key(), old, lanes)

        begin(wave, Outstanding(instruction, "vector", result.keys if result else (), finish))

    return Bound(instruction, run, "vmem", keys_of(data) + keys, result.keys if result else ())


def _visibility(instruction: Instruction) -> Bound:
    """Execute buffer_wbl2 (write back) or buffer_inv (invalidate) with sc1."""
    device = "sc1" in instruction.modifiers

    def run(wave: Wave) -> None:
        group = wave.group

        def finish() -> None:
            if not device:
                return
            if instruction.mnemonic == "buffer_wbl2":
                group.memory.publish(access_of(wave))
            else:
                wave.invalidated = group.memory.time

        begin(wave, Outstanding(instruction, "vector", (), finish))

    return Bound(instruction, run, "vmem")
