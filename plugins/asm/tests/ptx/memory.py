"""Global memory, shared memory with barriers, and the copy engine's descriptors."""

from __future__ import annotations

import ctypes
import struct

import attrs
import numpy as np

#: Where shared memory starts: what the system keeps lies in front.
SHARED = 1024
_MAP = struct.Struct("<QQQQIIII")


class Fault(AssertionError):
    """What hardware would not survive, or would compute wrongly."""


class Memory:
    """Buffers at made-up addresses, far apart."""

    def __init__(self) -> None:
        self.buffers: list[tuple[int, np.ndarray, bool]] = []

    def place(self, array: np.ndarray, writable: bool = False) -> int:
        """Take an array in, whose bytes are used where they lie, and give its address."""
        address = (len(self.buffers) + 1) << 40
        self.buffers.append((address, array.reshape(-1).view(np.uint8), writable))
        return address

    def take(self, address: int, size: int, writable: bool) -> None:
        """Take in bytes of this process where they lie."""
        self.buffers.append((address, np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)), writable))

    def find(self, address: int, size: int, write: bool) -> np.ndarray:
        """The bytes at an address."""
        for base, content, writable in self.buffers:
            if base <= address and address + size <= base + content.size:
                if write and not writable:
                    raise Fault(f"a write to {address:#x}, which is only read")
                if address % size:
                    raise Fault(f"{size} bytes at {address:#x}, which is no multiple")
                return content[address - base : address - base + size]
        raise Fault(f"{size} bytes at {address:#x} are in no buffer")


@attrs.define
class Barrier:
    """One mbarrier (PTX ISA, "mbarrier phase"): arrivals and bytes that its phase still waits for."""

    count: int
    pending: int
    bytes: int = 0
    parity: int = 0

    def arrive(self) -> None:
        """One arrival."""
        if not self.pending:
            raise Fault("more arrivals at a barrier than it counts")
        self.pending -= 1
        self.advance()

    def advance(self) -> None:
        """The phase ends where nothing is waited for."""
        if not self.pending and not self.bytes:
            self.pending, self.parity = self.count, self.parity ^ 1


@attrs.define
class Shared:
    """Shared memory of one thread block."""

    size: int
    content: np.ndarray = attrs.field(init=False)
    barriers: dict[int, Barrier] = attrs.field(factory=dict)
    reading: list[tuple[int, int]] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.content = np.full(SHARED + self.size, 0xFF, np.uint8)  # NaN in every format

    def barrier(self, address: int) -> Barrier:
        """The one at an address."""
        if address not in self.barriers:
            raise Fault(f"no barrier at {address} of shared memory")
        return self.barriers[address]

    def write(self, address: int, content: np.ndarray) -> None:
        """Bytes of the copy engine."""
        end = address + content.size
        if address < SHARED or end > SHARED + self.size:
            raise Fault(f"a copy to {address} of shared memory, which ends at {SHARED + self.size}")
        if any(begin < end and address < stop for begin, stop in self.reading):
            raise Fault(f"a copy to {address} of shared memory, which is being read")
        if any(address <= barrier < end for barrier in self.barriers):
            raise Fault("a copy over a barrier")
        self.content[address:end] = content


def described(address: int, rows: int, k: int, box: int, size: int = 2) -> bytes:
    """A descriptor as this emulator has it: of elements of *size* bytes, in boxes of 128 bytes by *box* rows, swizzled by 128 bytes."""
    return _MAP.pack(address, k, rows, size * k, 128 // size, box, 0, 0).ljust(128, b"\0")


def operand_of(told: bytes) -> tuple[int, int, int]:
    """Address, rows and bytes of a row of a descriptor."""
    address, _, rows, stride, *_ = _MAP.unpack(told[: _MAP.size])
    return address, rows, stride


def box_of(memory: Memory, told: bytes, k: int, row: int) -> np.ndarray:
    """The bytes of a box, one row after the other; what lies outside of the operand is zero."""
    address, width, rows, stride, deep, box, _, _ = _MAP.unpack(told[: _MAP.size])
    size = 128 // deep
    result = np.zeros((box, size * deep), np.uint8)
    inside = max(0, min(deep, width - k))
    for at in range(box):
        if row + at < rows and inside:
            begin = address + (row + at) * stride + size * k
            # The copy engine wants rows at multiples of 16 bytes.
            result[at, : size * inside] = np.concatenate([memory.find(begin + far, 16, False) for far in range(0, size * inside, 16)])
    return result


def swizzled(addresses: np.ndarray) -> np.ndarray:
    """Where bytes lie whose rows are swizzled by 128 bytes: bits 4 to 6 of an address are exclusive-ored with bits 7 to 9."""
    return addresses ^ ((addresses >> 7 & 7) << 4)
