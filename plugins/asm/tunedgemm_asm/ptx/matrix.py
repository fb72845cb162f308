"""Encode wgmma instructions and the matrix descriptors of their operands.

PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout" and "Matrix Descriptor Format".
All fields are divided by 16. Bits 0 to 13 are the address, 16 to 29 the leading dimension's offset
(unused with swizzled rows along K; 1), 32 to 45 the stride dimension's offset from 8 rows to the
next. Bits 62 and 63 are 1 for the 128-byte swizzle. Stages start at multiples of 1024 bytes, so the
base offset is 0.
"""

from __future__ import annotations

from tunedgemm_asm.ptx.names import SIDE, STEP_BYTES, STEP_K, UNIT_B, Variant

#: Bytes of an address unit in a descriptor; bits of the address.
UNIT, ADDRESS_BITS = 16, 14
_LEADING, _STRIDE, _SWIZZLE_128 = 1, 8 * STEP_BYTES // UNIT, 1
#: Descriptor without its address.
CONSTANT = _LEADING << 16 | _STRIDE << 32 | _SWIZZLE_128 << 62
#: Increment of a descriptor for 32 bytes along K, for 64 rows, and for one row.
ALONG_K, ALONG_ROWS, ROW = 2 * STEP_K // UNIT, SIDE * STEP_BYTES // UNIT, STEP_BYTES // UNIT


def descriptor(address: int) -> int:
    """Return the descriptor of rows of 128 bytes at an address in shared memory."""
    return CONSTANT | (address // UNIT) & ((1 << ADDRESS_BITS) - 1)


#: dtype -> type of the elements, elements along K, type of the accumulators (PTX ISA,
#: "wgmma.mma_async").
_KINDS = {"bf16": ("bf16", 16, "f32"), "fp16": ("f16", 16, "f32"), "fp8_e4m3fn": ("e4m3", 32, "f32"), "int8": ("s8", 32, "s32")}
#: Operands after the accumulator flag: signs of a and b, and for 16 bits whether each is
#: transposed.
_FLAGS = {"bf16": (1, 1, 0, 0), "fp16": (1, 1, 0, 0), "fp8_e4m3fn": (1, 1), "int8": ()}
#: Above this many rows of b, int8 instructions exist only for even multiples of 8.
_EVERY_INT8 = 32


def instruction(variant: Variant) -> str:
    """Return the instruction that multiplies 64 rows of a by a portion of b's rows, 32 bytes deep."""
    kind, deep, accumulators = _KINDS[variant.dtype]
    return f"wgmma.mma_async.sync.aligned.m64n{variant.config.portion}k{deep}.{accumulators}.{kind}.{kind}"


def flags(variant: Variant, adding: object = 1) -> tuple[object, ...]:
    """Return the operands after the descriptors; *adding* is a predicate where the first wgmma may
    not add.
    """
    return (adding, *_FLAGS[variant.dtype])


def multiplies(rows: int, dtype: str) -> bool:
    """Check whether an instruction exists for this many rows of b, a multiple of 8."""
    return dtype != "int8" or rows <= _EVERY_INT8 or rows % (2 * UNIT_B) == 0
