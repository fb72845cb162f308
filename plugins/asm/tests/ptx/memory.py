"""Model global memory, shared memory with barriers, and tensor maps."""

from __future__ import annotations

import ctypes
import struct

import attrs
import numpy as np

#: Start of shared memory; the system reserves the bytes before it.
SHARED = 1024
_MAP = struct.Struct("<QQQQIIII")


class Fault(AssertionError):
    """Error of an execution that hardware would not survive or would compute wrongly."""


class Memory:
    """Buffers at synthetic addresses, far apart."""

    def __init__(self) -> None:
        self.buffers: list[tuple[int, np.ndarray, bool]] = []

    def place(self, array: np.ndarray, writable: bool = False) -> int:
        """Add an array, whose bytes are used in place, and return its address."""
        address = (len(self.buffers) + 1) << 40
        self.buffers.append((address, array.reshape(-1).view(np.uint8), writable))
        return address

    def take(self, address: int, size: int, writable: bool) -> None:
        """Add bytes of this process at their address."""
        self.buffers.append((address, np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)), writable))

    def find(self, address: int, size: int, write: bool) -> np.ndarray:
        """Return the bytes at an address."""
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
    """One mbarrier (PTX ISA, "mbarrier phase"): pending arrivals and bytes of its phase."""

    count: int
    pending: int
    bytes: int = 0
    parity: int = 0

    def arrive(self) -> None:
        """Count one arrival."""
        if not self.pending:
            raise Fault("more arrivals at a barrier than it counts")
        self.pending -= 1
        self.advance()

    def advance(self) -> None:
        """End the phase if nothing is pending."""
        if not self.pending and not self.bytes:
            self.pending, self.parity = self.count, self.parity ^ 1


#: What the copy engine knows of a byte that a thread wrote: nothing, what that thread tells it,
#: what all threads do that it met.
WRITTEN, FENCED, MET = range(3)


@attrs.define
class Leaving:
    """Shared memory that TMA stores: whether it was read, and whether the thread knows."""

    begin: int
    end: int
    thread: int
    read: bool = False
    waited: bool = False


@attrs.define
class Shared:
    """Shared memory of one CTA."""

    size: int
    content: np.ndarray = attrs.field(init=False)
    barriers: dict[int, Barrier] = attrs.field(factory=dict)
    reading: list[tuple[int, int]] = attrs.field(factory=list)
    leaving: list[Leaving] = attrs.field(factory=list)
    writer: np.ndarray = attrs.field(init=False)
    known: np.ndarray = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.content = np.full(SHARED + self.size, 0xFF, np.uint8)  # NaN in every format
        # Writer of each byte (a thread, or none for the copy engine), and whether the copy engine
        # sees the write.
        self.writer = np.full(SHARED + self.size, -1, np.int32)
        self.known = np.zeros(SHARED + self.size, np.uint8)

    def barrier(self, address: int) -> Barrier:
        """Return the barrier at an address."""
        if address not in self.barriers:
            raise Fault(f"no barrier at {address} of shared memory")
        return self.barriers[address]

    def write(self, address: int, content: np.ndarray) -> None:
        """Write bytes of TMA."""
        self.put(address, content, -1)

    def put(self, address: int, content: np.ndarray, thread: int) -> None:
        """Write bytes of a thread of the CTA; -1 is TMA."""
        end = address + content.size
        if address < SHARED or end > SHARED + self.size:
            raise Fault(f"a copy to {address} of shared memory, which ends at {SHARED + self.size}")
        if any(begin < end and address < stop for begin, stop in self.reading):
            raise Fault(f"a copy to {address} of shared memory, which is being read")
        if any(entry.begin < end and address < entry.end for entry in self.leaving):
            raise Fault(f"a write to {address} of shared memory, which nobody knows to be stored")
        if any(address <= barrier < end for barrier in self.barriers):
            raise Fault("a copy over a barrier")
        self.content[address:end], self.writer[address:end], self.known[address:end] = content, thread, WRITTEN

    def fence(self, threads: np.ndarray) -> None:
        """Order these threads' writes before TMA's reads."""
        self.known[np.isin(self.writer, threads) & (self.known == WRITTEN)] = FENCED

    def meet(self, first: int, count: int) -> None:
        """Share the knowledge of synchronized threads."""
        self.known[(self.writer >= first) & (self.writer < first + count) & (self.known == FENCED)] = MET
        self.leaving = [entry for entry in self.leaving if not (entry.waited and first <= entry.thread < first + count)]

    def leave(self, begin: int, end: int, group: tuple[int, int], thread: int) -> Leaving:
        """Return bytes that TMA will read; *group* is the first synchronized thread and the number
        of threads.
        """
        if begin < SHARED or end > SHARED + self.size:
            raise Fault(f"a copy from {begin} of shared memory, which ends at {SHARED + self.size}")
        writer, known = self.writer[begin:end], self.known[begin:end]
        if (writer < group[0]).any() or (writer >= sum(group)).any():
            raise Fault("bytes are stored that no thread of the warp group wrote")
        if (known == WRITTEN).any():
            raise Fault("bytes are stored that were not fenced by who wrote them")
        if (known[writer != thread] == FENCED).any():
            raise Fault("bytes are stored of threads that were not met")
        self.leaving.append(entry := Leaving(begin, end, thread))
        return entry


def described(address: int, rows: int, k: int, box: int, size: int = 2, width: int = 128, columns: int = 0) -> bytes:
    """Return a tensor map of elements of *size* bytes and boxes of *width* bytes by *box* rows."""
    return _MAP.pack(address, k, rows, width if columns else size * k, width // size, box, width, columns).ljust(128, b"\0")


def operand_of(told: bytes) -> tuple[int, int, int]:
    """Return address, rows and row bytes of a tensor map over all columns."""
    address, _, rows, stride, *_, columns = _MAP.unpack(told[: _MAP.size])
    return address, rows, stride * max(1, columns)


def box_of(memory: Memory, told: bytes, k: int, row: int, *column: int) -> np.ndarray:
    """Return the bytes of a box row by row, zeros outside the operand."""
    address, width, rows, stride, deep, box, row_bytes, columns = _MAP.unpack(told[: _MAP.size])
    size = row_bytes // deep
    result = np.zeros((box, size * deep), np.uint8)
    if (columns > 0) != len(column):
        raise Fault(f"a box by {2 + len(column)} coordinates of a descriptor of {2 + (columns > 0)} dimensions")
    if column:
        if column[0] >= columns:
            return result
        address, width = address + column[0] * rows * stride, deep
    inside = max(0, min(deep, width - k))
    for at in range(box):
        if row + at < rows and inside:
            begin = address + (row + at) * stride + size * k
            # The copy engine wants rows at multiples of 16 bytes.
            result[at, : size * inside] = np.concatenate([memory.find(begin + far, 16, False) for far in range(0, size * inside, 16)])
    return result


def row_bytes_of(told: bytes) -> tuple[int, int]:
    """Return the bytes of a box's row and its rows."""
    *_, box, row_bytes, _ = _MAP.unpack(told[: _MAP.size])
    return row_bytes, box


def put_box(memory: Memory, told: bytes, at: tuple[int, int], content: np.ndarray) -> None:
    """Write a box *at* a column and row of an output, except outside it."""
    address, width, rows, stride, deep, box, row_bytes, _ = _MAP.unpack(told[: _MAP.size])
    (column, row), size = at, row_bytes // deep
    inside = size * max(0, min(deep, width - column))
    for number, line in enumerate(content.reshape(box, row_bytes)[: max(0, rows - row)]):
        for far in range(0, inside, 16):
            memory.find(address + (row + number) * stride + size * column + far, 16, True)[:] = line[far : far + 16]


def swizzled(addresses: np.ndarray, width: int = 128) -> np.ndarray:
    """Return the addresses of swizzled bytes (PTX ISA, "Swizzling Modes")."""
    return addresses ^ ((addresses >> 7 & width // 16 - 1) << 4)
