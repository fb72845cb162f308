"""Describe operands and outputs to TMA.

cuda.h and the CUDA Driver API, "Tensor Map Object Management": addresses and strides are multiples
of 16 bytes.
"""

from __future__ import annotations

import attrs
from tunedgemm.tools.launching import MapDescription

from tunedgemm_asm.ptx.names import ELEMENT_BYTES, STEP_BYTES

#: Alignment of rows in bytes.
ALIGNED = 16
#: CU_TENSOR_MAP_DATA_TYPE_UINT8, which copies any 8 bits, _FLOAT16 and _BFLOAT16.
_TYPES = {"fp8_e4m3fn": 0, "int8": 0, "fp16": 6, "bf16": 9}
#: CU_TENSOR_MAP_INTERLEAVE_NONE, _L2_PROMOTION_L2_256B, and zeros outside (_FLOAT_OOB_FILL_NONE).
_INTERLEAVE, _PROMOTION, _FILL = 0, 3, 0
#: Bytes of a box's rows -> CU_TENSOR_MAP_SWIZZLE_32B, _64B, _128B.
_SWIZZLES = {32: 1, 64: 2, 128: 3}


@attrs.frozen
class Operand:
    """Rows of elements, and the box of them that TMA copies at once.

    Attributes:
        dtype: dtype of the elements.
        rows, k: sizes.
        box: rows of a box.
        row_bytes: bytes of a box's rows, 32, 64 or 128, which is also the swizzle.
        columns: whether the operand is in columns of *row_bytes* along K, so that a box is
            contiguous; K has
            whole columns.
    """

    dtype: str
    rows: int
    k: int
    box: int
    row_bytes: int = STEP_BYTES
    columns: bool = False

    @property
    def dimensions(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return sizes in elements, innermost first, strides in bytes of all but the first, and box
        sizes.
        """
        size = ELEMENT_BYTES[self.dtype]
        wide = self.row_bytes // size
        if not self.columns:
            return (self.k, self.rows), (size * self.k,), (wide, self.box)
        return (wide, self.rows, self.k // wide), (self.row_bytes, self.row_bytes * self.rows), (wide, self.box, 1)

    @property
    def description(self) -> MapDescription:
        """Return the operand's tensor map but for its address."""
        return MapDescription(_TYPES[self.dtype], *self.dimensions, _INTERLEAVE, _SWIZZLES[self.row_bytes], _PROMOTION, _FILL)
