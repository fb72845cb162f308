"""Describe operands and outputs to TMA: 128-byte tensor maps that the driver encodes, cached by
address.

cuda.h and the CUDA Driver API, "Tensor Map Object Management": addresses and strides are multiples
of 16 bytes; a tensor map is aligned to 64.
"""

from __future__ import annotations

import ctypes

import attrs
from tunedgemm.tools import Driver

from tunedgemm_asm.ptx.abi import MAP_BYTES
from tunedgemm_asm.ptx.names import ELEMENT_BYTES, STEP_BYTES

#: Alignment of rows in bytes.
ALIGNED = 16
#: CU_TENSOR_MAP_DATA_TYPE_UINT8, which copies any 8 bits, _FLOAT16 and _BFLOAT16.
_TYPES = {"fp8_e4m3fn": 0, "int8": 0, "fp16": 6, "bf16": 9}
#: CU_TENSOR_MAP_INTERLEAVE_NONE, _L2_PROMOTION_L2_256B, and zeros outside (_FLOAT_OOB_FILL_NONE).
_INTERLEAVE, _PROMOTION, _FILL = 0, 3, 0
#: Bytes of a box's rows -> CU_TENSOR_MAP_SWIZZLE_32B, _64B, _128B.
_SWIZZLES = {32: 1, 64: 2, 128: 3}
_BOUNDARY = 64
#: Most tensor maps cached for one operand of one launcher; a full cache is cleared.
_KEPT = 4096


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
    def kinds(self) -> tuple[int, int, int, int]:
        """Return interleaving, swizzle, L2 promotion and fill."""
        return _INTERLEAVE, _SWIZZLES[self.row_bytes], _PROMOTION, _FILL

    @property
    def type(self) -> int:
        """Return the type of the elements."""
        return _TYPES[self.dtype]


def encode_map(driver: Driver, operand: Operand, address: int, index: int) -> bytes:
    """Return the tensor map of an operand at an address, on the device with this index.

    Raises:
        LaunchError: the driver rejects it.
    """
    memory = ctypes.create_string_buffer(MAP_BYTES + _BOUNDARY)
    start, (sizes, strides, box) = -ctypes.addressof(memory) % _BOUNDARY, operand.dimensions
    wide, rank = ctypes.c_uint64 * len(sizes), len(sizes)
    fields = wide(*sizes), wide(*strides), (ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*[1] * rank)
    where = ctypes.addressof(memory) + start
    driver.call("describe", where, operand.type, rank, address, *fields, *operand.kinds, index=index)
    return memory.raw[start : start + MAP_BYTES]


class Pool(dict[int, bytes]):
    """Cache of an operand's tensor maps by address; threads may encode the same one twice."""

    def __init__(self, driver: Driver, operand: Operand, index: int) -> None:
        super().__init__()
        self._driver, self._operand, self._index = driver, operand, index

    def __missing__(self, address: int) -> bytes:
        if len(self) >= _KEPT:
            self.clear()
        self[address] = encoded = encode_map(self._driver, self._operand, address, self._index)
        return encoded
