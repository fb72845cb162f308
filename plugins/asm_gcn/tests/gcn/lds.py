"""Model the LDS of a workgroup, with the last reader and writer of every 2 bytes."""

from __future__ import annotations

import numpy as np

from .fault import Fault

WAVES = 16
#: The writer of what a copy from memory is about to write.
COPY = 1000


class Lds:
    """``size`` bytes, initially undefined."""

    def __init__(self, size: int, *, races: bool = True, late_reads: bool = True, undefined: bool = True) -> None:
        self.size = size
        self.races = races
        self.late_reads = late_reads
        self.undefined = undefined
        self.data = np.zeros(-(-size // 16) * 16, np.uint8)
        halves = self.data.size // 2
        self.defined = np.zeros(halves, bool)
        #: The last writer of an entry of 2 bytes, the epoch in which its write was waited for, and
        #: how many writes are under way.
        self.writer = np.full(halves, -1, np.int32)
        self.written = np.full(halves, -1, np.int32)
        self.writing = np.zeros(halves, np.int16)
        #: Of each wave, the epoch in which its last read was waited for, and how many reads are
        #: under way.
        self.read = np.full((WAVES, halves), -1, np.int32)
        self.reading = np.zeros((WAVES, halves), np.int16)

    def places(self, addresses: np.ndarray, size: int, align: int) -> np.ndarray:
        """Check addresses [n] of ``size`` bytes and return the touched entries."""
        if addresses.size and (int(addresses.min()) < 0 or int(addresses.max()) + size > self.size):
            wrong = addresses[(addresses < 0) | (addresses + size > self.size)][0]
            raise Fault("bounds", f"LDS: {size} bytes at {int(wrong)}, of {self.size}")
        if (addresses % align).any():
            raise Fault(
                "alignment", f"LDS: {size} bytes at {int(addresses[addresses % align != 0][0])}, which must be a multiple of {align}"
            )
        return ((addresses // 2)[:, None] + np.arange((size + 1) // 2)).reshape(-1)

    def load(self, addresses: np.ndarray, size: int, wave: int, epoch: int, align: int) -> tuple[np.ndarray, np.ndarray]:
        """Return bytes [n, size] and the entries for `finish_read`."""
        halves = self.places(addresses, size, align)
        if self.undefined and not self.defined[halves].all():
            raise Fault("undefined", f"LDS: byte {2 * int(halves[~self.defined[halves]][0])} was never written")
        if self.races:
            self._order(halves, wave, epoch)
            self.read[wave, halves] = epoch
            self.reading[wave, halves] += self.late_reads
        return self.data[addresses[:, None] + np.arange(size)], halves

    def finish_read(self, halves: np.ndarray, wave: int, epoch: int) -> None:
        """Complete a read: others may overwrite it after the next barrier."""
        if self.races and self.late_reads:
            self.read[wave, halves] = epoch
            self.reading[wave, halves] -= 1

    def store(self, addresses: np.ndarray, values: np.ndarray, wave: int, epoch: int, align: int) -> np.ndarray:
        """Write bytes [n, size] and return the entries for `finish_write`."""
        halves = self.places(addresses, values.shape[1], align)
        if self.races:
            self._order(halves, wave, epoch)
            reads = (self.read[:, halves] >= epoch) | (self.reading[:, halves] > 0)
            reads[wave] = False
            if reads.any():
                other, at = np.argwhere(reads)[0]
                why = "and did not wait for it" if self.reading[other, halves[at]] else "since the last barrier"
                raise Fault("race", f"LDS: byte {2 * int(halves[at])} is overwritten, which wave {other} read {why}")
            self.writer[halves] = wave
            self.writing[halves] += 1
        self.data[addresses[:, None] + np.arange(values.shape[1])] = values
        self.defined[halves] = True
        return halves

    def announce(self, addresses: np.ndarray, size: int, wave: int, epoch: int) -> np.ndarray:
        """Start a copy to LDS, which no wave may use until it is waited for."""
        halves = self.store(addresses, np.zeros((addresses.size, size), np.uint8), wave, epoch, 4)
        if self.races:
            self.writer[halves] = COPY
        self.defined[halves] = False
        return halves

    def arrive(self, addresses: np.ndarray, values: np.ndarray, halves: np.ndarray, wave: int, epoch: int) -> None:
        """Complete a copy with bytes [n, size]."""
        self.data[addresses[:, None] + np.arange(values.shape[1])] = values
        self.defined[halves] = True
        self.writer[halves] = wave
        self.finish_write(halves, epoch)

    def finish_write(self, halves: np.ndarray, epoch: int) -> None:
        """Complete a write: others may use it after the next barrier."""
        if self.races:
            self.written[halves] = epoch
            self.writing[halves] -= 1

    def _order(self, halves: np.ndarray, wave: int, epoch: int) -> None:
        """Raise where another wave's write is not ordered by a barrier."""
        foreign = (self.writer[halves] != wave) & (self.writer[halves] >= 0)
        racing = halves[foreign & ((self.written[halves] >= epoch) | (self.writing[halves] > 0))]
        if racing.size:
            first = racing[0]
            why = "and did not wait for it" if self.writing[first] else "since the last barrier"
            raise Fault("race", f"LDS: byte {2 * int(first)} was written by {_writer(int(self.writer[first]))} {why}")


def _writer(number: int) -> str:
    return "a copy from memory" if number == COPY else f"wave {number}"
