"""Execute scalar memory instructions: loads of 1 to 16 words, stores and atomics."""

from __future__ import annotations

import re

import numpy as np

from .fault import Fault
from .global_memory import ATOMICS, access_of
from .operands import Bound, keys_of, register_of, unsupported
from .scalar import value_of
from .text import Instruction, Number, Register
from .waits import begin
from .wave import Outstanding, Wave

_NAME = re.compile(r"^s_(buffer_)?(load|store)_dword(?:x(\d+))?$")


def bind(instruction: Instruction) -> Bound | None:
    """Return an executable scalar memory instruction, or None."""
    found = _NAME.match(instruction.mnemonic)
    if set(instruction.modifiers) - {"glc", "offset", "imm"}:
        return None if not found else _refuse(instruction)
    if found:
        words = int(found[3] or 1)
        return _load(instruction, words, bool(found[1])) if found[2] == "load" else _store(instruction, words)
    if instruction.mnemonic.startswith("s_atomic_"):
        return _atomic(instruction)
    return None


def _refuse(instruction: Instruction) -> Bound:
    raise unsupported(instruction, ", ".join(instruction.modifiers))


def _address(instruction: Instruction, wave: Wave) -> int:
    """Return base and offset, with the last two bits ignored."""
    base = instruction.operands[1]
    assert isinstance(base, Register)
    offset = sum(value_of(operand)(wave) if isinstance(operand, Register) else _signed(operand) for operand in instruction.operands[2:])
    return (wave.get64(base.first) + offset + int(instruction.modifiers.get("offset", 0))) & ~3


def _signed(operand: object) -> int:
    if not isinstance(operand, Number):
        raise Fault("operand", f"{operand} is no offset")
    return int(operand.value)


def _base(instruction: Instruction, count: int) -> Register:
    base = register_of(instruction, 1, "s")
    if base.count != count:
        raise Fault("operand", f"{instruction}: {base} must be {count} registers")
    return base


def _load(instruction: Instruction, words: int, buffered: bool) -> Bound:
    out = register_of(instruction, 0, "s")
    base = _base(instruction, 4 if buffered else 2)
    if out.count != words:
        raise Fault("operand", f"{instruction}: {out} must be {words} registers")

    def run(wave: Wave) -> None:
        memory, access = wave.group.memory, access_of(wave, device="glc" in instruction.modifiers, scalar=True)
        if buffered:
            offset = sum(value_of(operand)(wave) for operand in instruction.operands[2:])
            start = wave.get(base.first) | ((wave.get(base.first + 1) & 0xFFFF) << 32)
            at = [start + (offset & ~3) + 4 * word for word in range(words)]
            inside = [(offset & ~3) + 4 * word + 4 <= wave.get(base.first + 2) for word in range(words)]
        else:
            address = _address(instruction, wave)
            at, inside = [address + 4 * word for word in range(words)], [True] * words
        chosen = np.asarray([address for address, ok in zip(at, inside, strict=True) if ok], np.uint64)
        memory.check(chosen, 4)

        def finish() -> None:
            found = iter(memory.load(chosen, 4, access).view(np.uint32).reshape(-1))
            for word, ok in enumerate(inside):
                wave.put(out.first + word, int(next(found)) if ok else 0)

        begin(wave, Outstanding(instruction, "scalar", out.keys, finish))

    return Bound(instruction, run, "smem", keys_of(*instruction.operands[1:]), out.keys)


def _store(instruction: Instruction, words: int) -> Bound:
    data = register_of(instruction, 0, "s")
    _base(instruction, 2)

    def run(wave: Wave) -> None:
        memory, address = wave.group.memory, _address(instruction, wave)
        values = np.asarray([wave.get(data.first + word) for word in range(words)], np.uint32)
        at = np.asarray([address + 4 * word for word in range(words)], np.uint64)
        memory.check(at, 4)
        since, device = memory.time, "glc" in instruction.modifiers

        def finish() -> None:
            access = access_of(wave, device=device)
            memory.store(at, values.view(np.uint8).reshape(-1, 4), access)
            if device:
                memory.synchronise(address, access, since)

        begin(wave, Outstanding(instruction, "scalar", (), finish))

    return Bound(instruction, run, "smem", keys_of(*instruction.operands))


def _atomic(instruction: Instruction) -> Bound:
    name = instruction.mnemonic[len("s_atomic_") :]
    if name not in ATOMICS:
        raise unsupported(instruction)
    data = register_of(instruction, 0, "s")
    _base(instruction, 2)
    returning = "glc" in instruction.modifiers

    def run(wave: Wave) -> None:
        memory, address = wave.group.memory, np.asarray([_address(instruction, wave)], np.uint64)
        given = np.asarray([wave.get(data.first)], np.uint32)
        memory.check(address, 4)
        access = access_of(wave, device=True)
        old = memory.load(address, 4, access, atomic=True).view(np.uint32).reshape(-1)
        memory.synchronise(int(address[0]), access, memory.time)
        memory.store(address, np.asarray(ATOMICS[name](old.copy(), given), np.uint32).view(np.uint8).reshape(1, 4), access, atomic=True)
        finish = (lambda: wave.put(data.first, int(old[0]))) if returning else None
        begin(wave, Outstanding(instruction, "scalar", data.keys if returning else (), finish))

    return Bound(instruction, run, "smem", keys_of(*instruction.operands), data.keys if returning else ())
