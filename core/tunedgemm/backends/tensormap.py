"""Describe operands to CUDA's Tensor Memory Accelerator (TMA), as arguments of a kernel.

The driver encodes a description and an address into a tensor map of 128 bytes. cuda.h and the CUDA
Driver API, "Tensor Map Object Management": addresses and strides are multiples of 16 bytes. A
tensor map is aligned to 64.
"""

from __future__ import annotations

import ctypes
from typing import Any

import attrs

from tunedgemm.errors import PluginError

#: Bytes of a tensor map, and most dimensions.
MAP_BYTES, MAX_RANK = 128, 5
_ALIGNMENT = 64
#: Most tensor maps cached for one operand of one launch; a full cache is cleared.
_MAX_ENTRIES = 4096


@attrs.frozen
class MapDescription:
    """Everything of a tensor map but its address: the arguments of cuTensorMapEncodeTiled.

    Attributes:
        element: type of the elements (CUtensorMapDataType).
        sizes: elements of each dimension, innermost first.
        strides: bytes from one index to the next, of all dimensions but the first.
        box: elements of each dimension that TMA copies at once.
        interleave, swizzle, promotion, fill: numbers of the driver's other enumerations.
    """

    element: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    interleave: int = 0
    swizzle: int = 0
    promotion: int = 0
    fill: int = 0

    def __attrs_post_init__(self) -> None:
        rank = len(self.sizes)
        if not 1 <= rank <= MAX_RANK:
            raise PluginError(f"tensor map: 1 to {MAX_RANK} dimensions (got {rank})")
        if (len(self.strides), len(self.box)) != (rank - 1, rank):
            counts = f"{len(self.strides)} strides and a box of {len(self.box)}"
            raise PluginError(f"tensor map of {rank} dimensions: {rank - 1} strides and a box of {rank} (got {counts})")

    @property
    def kinds(self) -> tuple[int, int, int, int]:
        """Return interleaving, swizzle, L2 promotion and fill, in the driver's order."""
        return self.interleave, self.swizzle, self.promotion, self.fill


@attrs.frozen
class TensorMap:
    """Tensor map among a kernel's arguments, encoded once for an address.

    Attributes:
        slot: offset of its 128 bytes.
        source: index of its address among those of a launch.
        description: the rest.
    """

    slot: int
    source: int
    description: MapDescription

    @property
    def fields(self) -> tuple[Any, ...]:
        """Return the tuple that the C extension reads."""
        it = self.description
        return self.slot, self.source, it.element, it.sizes, it.strides, it.box, it.kinds


class MapCache(dict[int, Any]):
    """An operand's tensor maps by address; of an address that the driver refuses, its status.

    Threads may encode the same one twice.
    """

    def __init__(self, describe: Any, description: MapDescription) -> None:
        super().__init__()
        rank, it = len(description.sizes), description
        wide, narrow = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
        self._describe, self._head, self._kinds = describe, (it.element, rank), it.kinds
        self._fields = wide(*it.sizes), wide(*it.strides), narrow(*it.box), narrow(*[1] * rank)

    def __missing__(self, address: int) -> bytes | int:
        memory = ctypes.create_string_buffer(MAP_BYTES + _ALIGNMENT)
        start = -ctypes.addressof(memory) % _ALIGNMENT
        if status := self._describe(ctypes.addressof(memory) + start, *self._head, address, *self._fields, *self._kinds):
            return int(status)
        if len(self) >= _MAX_ENTRIES:
            self.clear()
        self[address] = encoded = memory.raw[start : start + MAP_BYTES]
        return encoded
