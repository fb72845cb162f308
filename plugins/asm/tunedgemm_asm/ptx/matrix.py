"""The matrix instruction: descriptors of its operands in shared memory, and its name.

PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout" and "Matrix Descriptor Format": bits 0 to 13 of a descriptor are the
address over 16, 16 to 29 the leading dimension's offset over 16 (not used where rows along K are swizzled; 1), 32 to 45 the stride
dimension's, from 8 rows to the next, over 16; 62 and 63 are 1 for a swizzle of 128 bytes. Stages start at multiples of 1024 bytes, so
the base offset is 0.
"""

from __future__ import annotations

from tunedgemm_asm.ptx.plan import SIDE, STEP_BYTES, STEP_K, Variant

#: Bytes of one unit of an address in a descriptor, and bits of it.
UNIT, ADDRESS_BITS = 16, 14
_LEADING, _STRIDE, _SWIZZLE_128 = 1, 8 * STEP_BYTES // UNIT, 1
#: A descriptor but for its address.
CONSTANT = _LEADING << 16 | _STRIDE << 32 | _SWIZZLE_128 << 62
#: What moves it by 16 elements along K, and by the 64 rows of an instruction.
ALONG_K, ALONG_ROWS = 2 * STEP_K // UNIT, SIDE * STEP_BYTES // UNIT


def descriptor(address: int) -> int:
    """Of rows of 128 bytes at an address in shared memory."""
    return CONSTANT | (address // UNIT) & ((1 << ADDRESS_BITS) - 1)


def instruction(variant: Variant) -> str:
    """64 rows of a by all rows of b in a tile, 16 deep, in float32."""
    kind = {"bf16": "bf16", "fp16": "f16"}[variant.dtype]
    return f"wgmma.mma_async.sync.aligned.m64n{variant.plan.tile_b}k16.f32.{kind}.{kind}"
