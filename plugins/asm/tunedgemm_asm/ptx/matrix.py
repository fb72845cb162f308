"""The matrix instruction: descriptors of its operands in shared memory, and its name.

PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout" and "Matrix Descriptor Format": bits 0 to 13 of a descriptor are the
address over 16, 16 to 29 the leading dimension's offset over 16 (not used where rows along K are swizzled; 1), 32 to 45 the stride
dimension's, from 8 rows to the next, over 16; 62 and 63 are 1 for a swizzle of 128 bytes. Stages start at multiples of 1024 bytes, so
the base offset is 0.
"""

from __future__ import annotations

from tunedgemm_asm.ptx.names import SIDE, STEP_BYTES, STEP_K, UNIT_B, Variant

#: Bytes of one unit of an address in a descriptor, and bits of it.
UNIT, ADDRESS_BITS = 16, 14
_LEADING, _STRIDE, _SWIZZLE_128 = 1, 8 * STEP_BYTES // UNIT, 1
#: A descriptor but for its address.
CONSTANT = _LEADING << 16 | _STRIDE << 32 | _SWIZZLE_128 << 62
#: What moves it by the 32 bytes of an instruction along K, by its 64 rows, and by one.
ALONG_K, ALONG_ROWS, ROW = 2 * STEP_K // UNIT, SIDE * STEP_BYTES // UNIT, STEP_BYTES // UNIT


def descriptor(address: int) -> int:
    """Of rows of 128 bytes at an address in shared memory."""
    return CONSTANT | (address // UNIT) & ((1 << ADDRESS_BITS) - 1)


#: Kind of the elements, elements along K, and kind of the accumulators; PTX ISA, "wgmma.mma_async".
_KINDS = {"bf16": ("bf16", 16, "f32"), "fp16": ("f16", 16, "f32"), "fp8_e4m3fn": ("e4m3", 32, "f32"), "int8": ("s8", 32, "s32")}
#: What stands behind the flag of the accumulators: signs of both operands, and whether they are transposed, which 16 bits can be alone.
_FLAGS = {"bf16": (1, 1, 0, 0), "fp16": (1, 1, 0, 0), "fp8_e4m3fn": (1, 1), "int8": ()}
#: Beyond so many rows of b of 8-bit integers every second multiple of 8 alone is an instruction.
_EVERY_INT8 = 32


def instruction(variant: Variant) -> str:
    """64 rows of a by all rows of b in a tile, or a portion of them, 32 bytes deep."""
    kind, deep, accumulators = _KINDS[variant.dtype]
    return f"wgmma.mma_async.sync.aligned.m64n{variant.config.portion}k{deep}.{accumulators}.{kind}.{kind}"


def flags(variant: Variant, adding: object = 1) -> tuple[object, ...]:
    """What stands behind the descriptors; *adding* is a predicate where products do not always add to the accumulators."""
    return (adding, *_FLAGS[variant.dtype])


def multiplies(rows: int, dtype: str) -> bool:
    """Whether there is an instruction for so many rows of b, a multiple of 8."""
    return dtype != "int8" or rows <= _EVERY_INT8 or rows % (2 * UNIT_B) == 0
