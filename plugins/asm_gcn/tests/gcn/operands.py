"""Convert operands to arrays of 64 lanes and write results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

from .fault import Fault
from .text import VECTOR, Instruction, Name, Number, Operand, Register
from .wave import LANES, Wave

Getter = Callable[[Wave], Any]
#: A kind of value by its letter: unsigned, signed and float of 32 bits, the same of 64 bits, and of
#: the lower 16 bits of a register.
DTYPES = {
    "u": np.uint32,
    "i": np.int32,
    "f": np.float32,
    "U": np.uint64,
    "I": np.int64,
    "F": np.float64,
    "H": np.uint16,
    "S": np.int16,
    "h": np.float16,
}
_SELECT = {"DWORD": (0, 32), "WORD_0": (0, 16), "WORD_1": (16, 16)} | {f"BYTE_{at}": (8 * at, 8) for at in range(4)}


@attrs.define(eq=False)
class Bound:
    """An executable instruction with the registers that it reads and writes."""

    instruction: Instruction
    run: Callable[[Wave], None]
    kind: str
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    flags: frozenset[str] = frozenset()
    passes: int = 0
    addend: tuple[int, ...] = ()
    product: tuple[int, ...] = ()
    select: tuple[int, ...] = ()
    data: tuple[int, ...] = ()
    touched: frozenset[int] = frozenset()
    vector_reads: tuple[int, ...] = ()
    scalar_reads: tuple[int, ...] = ()

    def __attrs_post_init__(self) -> None:
        self.touched = frozenset(self.reads) | frozenset(self.writes)
        self.vector_reads = tuple(sorted({key for key in self.reads if key >= VECTOR}))
        self.scalar_reads = tuple(sorted({key for key in self.reads if key < VECTOR}))


def unsupported(instruction: Instruction, why: str = "") -> Fault:
    return Fault("unsupported", f"{instruction}{': ' if why else ''}{why}")


def keys_of(*operands: Operand | None) -> tuple[int, ...]:
    """Return the keys of the registers among operands."""
    return tuple(key for operand in operands if isinstance(operand, Register) for key in operand.keys)


def register_of(instruction: Instruction, at: int, files: str = "v") -> Register:
    """Return an operand that must be a register of one of the files."""
    found = instruction.operands[at] if at < len(instruction.operands) else None
    if isinstance(found, Register) and found.file in files:
        return found
    raise Fault("operand", f"{instruction}: operand {at} must be a register of {' or '.join(files)}")


def word(operand: Operand, at: int = 0, width: int = 32) -> Getter:
    """Return the ``at``-th 32 bits of an operand."""
    if isinstance(operand, Number):
        constant = np.uint32((operand.bits(width) >> (32 * at)) & 0xFFFFFFFF)
        return lambda wave: constant
    if isinstance(operand, Name):
        if operand.name in ("scc", "src_scc"):
            return lambda wave: np.uint32(wave.scc)
        raise Fault("operand", f"{operand.name} is no source")
    if at >= operand.count:
        raise Fault("operand", f"{operand} is too narrow")
    key = operand.key(at)
    if operand.file == "s":
        return lambda wave: np.uint32(wave.get(key))
    row = key - VECTOR

    def vector(wave: Wave) -> Any:
        if not wave.known[key]:
            wave.check(key)
        return wave.v[row]

    return vector


def _signed(get: Getter, operand: Operand, kind: str) -> Getter:
    """Apply absolute value and negation."""
    negative, absolute = getattr(operand, "negative", False), getattr(operand, "absolute", False)
    if not negative and not absolute:
        return get
    if kind == "u":
        low, flip = np.uint32(0x7FFFFFFF if absolute else 0xFFFFFFFF), np.uint32(0x80000000 if negative else 0)
        return lambda wave: (get(wave) & low) ^ flip
    if kind not in "fFh":
        raise Fault("operand", "a modifier of a float on an integer")
    if absolute:
        return (lambda wave: -np.abs(get(wave))) if negative else (lambda wave: np.abs(get(wave)))
    return lambda wave: -get(wave)


def _selected(get: Getter, how: str, *, extend: bool = False) -> Getter:
    """Return the part of 32 bits that SDWA selects."""
    shift, width = _SELECT[how]
    if width == 32:
        return get
    mask = np.uint32((1 << width) - 1)
    if extend:
        return lambda wave: (get(wave) << np.uint32(32 - shift - width)).view(np.int32).__rshift__(32 - width).view(np.uint32)
    return lambda wave: (get(wave) >> np.uint32(shift)) & mask


def source(operand: Operand, kind: str, select: str = "DWORD", moved: Callable[[Wave, Any], Any] | None = None) -> Getter:
    """Return a source as an array, with SDWA selection and DPP moves."""
    dtype = DTYPES[kind]
    if kind in "UIF":
        if moved or select != "DWORD":
            raise Fault("unsupported", "64 bits with SDWA or DPP")
        low, high = word(operand, 0, 64), word(operand, 1, 64)
        if isinstance(operand, Number) and kind == "F" and isinstance(operand.value, int) and not -16 <= operand.value <= 64:
            low, high = (lambda wave: np.uint32(0)), word(operand, 0)  # a literal is the upper half of a double

        def wide(wave: Wave) -> Any:
            return (np.uint64(low(wave)) | (np.uint64(high(wave)) << np.uint64(32))).view(dtype)

        return _signed(wide, operand, kind)
    get = _selected(word(operand, 0, 16 if kind == "h" else 32), select)
    if moved:
        get = _moving(get, moved)
    if kind in "HSh":
        return _signed(lambda wave: get(wave).astype(np.uint16).view(dtype), operand, kind)
    return _signed(get if kind == "u" else (lambda wave: get(wave).view(dtype)), operand, kind)


def _moving(get: Getter, moved: Callable[[Wave, Any], Any]) -> Getter:
    return lambda wave: moved(wave, get(wave))


def target(register: Register, kind: str) -> Callable[[Wave, Any], None]:
    """Write a value to the active lanes of a vector register."""
    key = register.key()
    if kind in "UIF":
        if register.count != 2:
            raise Fault("operand", f"{register} must be two registers")
        above = register.key(1)

        def both(wave: Wave, value: Any) -> None:
            bits = np.asarray(value, DTYPES[kind]).view(np.uint64)
            wave.write(key, (bits & np.uint64(0xFFFFFFFF)).astype(np.uint32))
            wave.write(above, (bits >> np.uint64(32)).astype(np.uint32))

        return both
    dtype = DTYPES[kind]
    if kind in "HSh":
        return lambda wave, value: wave.write(key, np.asarray(value, dtype).view(np.uint16).astype(np.uint32))
    return lambda wave, value: wave.write(key, np.asarray(value, dtype).view(np.uint32))


def part(register: Register, how: str, unused: str) -> Callable[[Wave, Any], None]:
    """Write a part of a register as SDWA does."""
    shift, width = _SELECT[how]
    mask = np.uint32(((1 << width) - 1) << shift)
    key = register.key()

    def write(wave: Wave, value: Any) -> None:
        bits = (np.asarray(value).astype(np.uint32) << np.uint32(shift)) & mask
        if unused == "UNUSED_PRESERVE" and width < 32:
            wave.check(key)
            bits = bits | (wave.v[key - VECTOR] & ~mask)
        elif unused == "UNUSED_SEXT" and width < 32:
            raise Fault("unsupported", unused)
        wave.write(key, bits)

    return write


def mask_source(operand: Operand) -> Callable[[Wave], int]:
    """Return a 64-lane mask from two scalar registers."""
    if isinstance(operand, Register) and operand.file == "s" and operand.count == 2:
        return lambda wave: wave.get64(operand.first)
    if isinstance(operand, Number):
        return lambda wave: operand.bits(64)
    raise Fault("operand", f"{operand} is no mask of 64 lanes")


def lane_move(instruction: Instruction) -> tuple[np.ndarray, np.ndarray]:
    """Return each lane's DPP source and its validity (CDNA3 ISA, "DPP_CTRL enumeration")."""
    lane = np.arange(LANES)
    row, place = lane & ~15, lane & 15
    given = instruction.modifiers
    if "quad_perm" in given:
        return (lane & ~3) + np.asarray(given["quad_perm"])[lane & 3], np.ones(LANES, bool)
    for name, step in (("row_shr", -1), ("row_shl", 1)):
        if name in given:
            at = place + step * given[name]
            return row + (at & 15), (at >= 0) & (at < 16)
    if "row_ror" in given:
        return row + ((place - given["row_ror"]) & 15), np.ones(LANES, bool)
    if "row_newbcast" in given:
        return row + given["row_newbcast"], np.ones(LANES, bool)
    if "row_bcast" in given:
        step = given["row_bcast"] + 1
        at = (lane // step) * step - 1
        return at & 63, (at >= 0) & ((lane // step) % 2 == 1 if step == 16 else lane >= 32)
    if "row_mirror" in instruction.text:
        return row + 15 - place, np.ones(LANES, bool)
    if "row_half_mirror" in instruction.text:
        return (lane & ~7) + 7 - (lane & 7), np.ones(LANES, bool)
    raise unsupported(instruction, "how DPP moves lanes")
