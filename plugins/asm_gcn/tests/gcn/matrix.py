"""Execute MFMA of gfx942 and gfx950 with the layouts of the ISA guides. Of A [m, k] and B [k, n]
each lane holds a row or column, lane % 16 or % 32; further lanes hold the next values of k, which
are consecutive in the registers. Of D [m, n], register r of a lane is row 4 * (lane / 16) + r of
16, or row 8 * (r / 4) + 4 * (lane / 32) + r % 4 of 32.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

from .fault import Fault
from .numbers import e4m3
from .operands import Bound, keys_of, register_of, unsupported
from .text import VECTOR, Instruction, Number, Operand, Register
from .wave import LANES, Wave

_NAME = re.compile(r"^v_mfma_([fi]32)_(\d+)x(\d+)x(\d+)_?(bf16|f16|f32|i8|fp8_fp8)(_1k)?$")


@attrs.frozen
class Shape:
    """One MFMA: m = n, k, input kind, passes (4 cycles each) and architectures."""

    side: int
    depth: int
    kind: str
    passes: int
    gfx: tuple[str, ...] = ("gfx942", "gfx950")


#: LLVM's scheduling model of gfx942 gives the passes.
SHAPES = {
    (shape.side, shape.depth, shape.kind): shape
    for shape in (
        Shape(16, 16, "bf16", 4), Shape(32, 8, "bf16", 8), Shape(16, 16, "f16", 4), Shape(32, 8, "f16", 8),
        Shape(16, 32, "bf16", 4, ("gfx950",)), Shape(32, 16, "bf16", 8, ("gfx950",)), Shape(16, 32, "f16", 4, ("gfx950",)),
        Shape(32, 16, "f16", 8, ("gfx950",)), Shape(16, 4, "f32", 8), Shape(32, 2, "f32", 16),
        Shape(16, 32, "i8", 4), Shape(32, 16, "i8", 8), Shape(16, 32, "fp8_fp8", 4), Shape(32, 16, "fp8_fp8", 8),
    )
}  # fmt: skip
#: Values of the 256 codes: gfx942 has its own format, gfx950 that of OCP.
FP8 = {"gfx942": e4m3(fnuz=True), "gfx950": e4m3(fnuz=False)}
_ELEMENTS = {"bf16": 2, "f16": 2, "f32": 1, "i8": 4, "fp8_fp8": 4}


def values_of(words: np.ndarray, kind: str, gfx: str) -> np.ndarray:
    """Return elements [64, n] of registers as float32, or int32 for int8."""
    flat = np.ascontiguousarray(words.T)
    if kind == "fp8_fp8":
        return FP8[gfx][flat.view(np.uint8)]
    if kind == "bf16":
        return (flat.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if kind == "f16":
        return flat.view(np.float16).astype(np.float32)
    return flat.view(np.int8).astype(np.int32) if kind == "i8" else flat.view(np.float32)


def matrix_of(elements: np.ndarray, side: int) -> np.ndarray:
    """Return A or transposed B [side, k] from the lanes' elements."""
    each = elements.shape[1]
    return elements.reshape(LANES // side, side, each).transpose(1, 0, 2).reshape(side, -1)


def rows_of(side: int) -> np.ndarray:
    """Return the row of D of each register and lane: [registers, 64]."""
    lane = np.arange(LANES)
    register = np.arange(side * side // LANES)[:, None]
    if side == 16:
        return 4 * (lane // 16) + register
    return 8 * (register // 4) + 4 * (lane // 32) + register % 4


def bind(instruction: Instruction, gfx: str) -> Bound | None:
    """Return an executable MFMA, or None."""
    if not instruction.mnemonic.startswith(("v_mfma", "v_smfma")):
        return None
    found = _NAME.match(instruction.mnemonic)
    shape = SHAPES.get((int(found[2]), int(found[4]), found[5])) if found else None
    if not found or not shape or gfx not in shape.gfx or any(instruction.modifiers.values()):
        raise unsupported(instruction, f"on {gfx}")
    out = register_of(instruction, 0, "va")
    first, second = register_of(instruction, 1, "va"), register_of(instruction, 2, "va")
    wide = shape.side * shape.depth // LANES // _ELEMENTS[shape.kind]
    addend = instruction.operands[3]
    for register, count in ((out, shape.side**2 // LANES), (first, wide), (second, wide)):
        if register.count != count:
            raise Fault("operand", f"{instruction}: {register} must be {count} registers")
    if isinstance(addend, Register) and addend.count != out.count:
        raise Fault("operand", f"{instruction}: {addend} must be {out.count} registers")
    return Bound(
        instruction, _run(shape, gfx, (out, first, second), addend), "mfma", keys_of(first, second, addend), out.keys,
        passes=shape.passes, addend=keys_of(addend), product=out.keys,
    )  # fmt: skip


def _run(shape: Shape, gfx: str, registers: tuple[Register, Register, Register], addend: Operand) -> Callable[[Wave], None]:
    out, first, second = registers
    rows, columns = rows_of(shape.side), np.broadcast_to(np.arange(LANES) % shape.side, (out.count, LANES))
    dtype: Any = np.int32 if shape.kind == "i8" else np.float32
    everywhere = np.ones(LANES, bool)
    top = out.key() - VECTOR
    used, written = keys_of(first, second, addend), out.keys
    constant = np.uint32(addend.bits()).view(dtype) if isinstance(addend, Number) else None

    def block(wave: Wave, register: Register) -> np.ndarray:
        return wave.v[register.key() - VECTOR : register.key() - VECTOR + register.count]

    def run(wave: Wave) -> None:
        for key in used:
            if not wave.known[key]:
                wave.check(key, everywhere)
        a = matrix_of(values_of(block(wave, first), shape.kind, gfx), shape.side)
        b = matrix_of(values_of(block(wave, second), shape.kind, gfx), shape.side)
        product = (a @ b.T)[rows, columns]
        before = constant if constant is not None else block(wave, addend).view(dtype)  # type: ignore[arg-type]
        wave.v[top : top + out.count] = (product + before).astype(dtype).view(np.uint32)
        for key in written:
            wave.known[key] = 1

    return run
