"""Model global memory: allocations at synthetic addresses, with their writers, for rules between
workgroups.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import Any

import attrs
import numpy as np

from .fault import Fault

_FIRST, _STEP = 0x7F00_0000_0000, 1 << 24
#: Of a byte that was written but that other workgroups may not see yet.
HIDDEN = np.iinfo(np.int64).max


@attrs.define(eq=False)
class Allocation:
    """Bytes at an address."""

    name: str
    base: int
    size: int
    data: np.ndarray
    defined: np.ndarray | None
    written: Writes | None = None


class Writes:
    """Last write of every 2 bytes of an allocation."""

    def __init__(self, halves: int) -> None:
        self.writer = np.full(halves, -1, np.int32)
        self.done = np.full(halves, -1, np.int64)
        self.publisher = np.full(halves, -1, np.int32)
        self.seen = np.full(halves, -1, np.int64)
        self.atomic = np.zeros(halves, bool)


@attrs.define(eq=False)
class Access:
    """The accessing wave and workgroup, the age of its view, and its scope."""

    wave: int
    group: int
    fresh: int
    device: bool = False
    judged: bool = True


class Memory:
    """Global memory."""

    def __init__(self) -> None:
        self._allocations: list[Allocation] = []
        self._bases: list[int] = []
        self.time = 0
        #: Which workgroup a wave's number belongs to, by number.
        self.groups: list[int] = []
        self._clocks: dict[int, dict[int, int]] = {}
        #: Of addresses that synchronise, what those who wrote there knew.
        self._synchronised: dict[int, dict[int, int]] = {}
        #: Of each workgroup, what it wrote that others may not see yet.
        self._hidden: dict[int, list[tuple[Allocation, np.ndarray]]] = {}

    def place(self, name: str, content: np.ndarray | int, offset: int = 0) -> int:
        """Allocate an array, or undefined bytes, ``offset`` bytes after a multiple of 16 MiB."""
        size = content if isinstance(content, int) else content.nbytes
        base = _FIRST + _STEP * len(self._allocations) + offset
        if self._allocations:
            last = self._allocations[-1]
            base = max(base, -(-(last.base + last.size + _STEP) // _STEP) * _STEP + offset)
        data = np.full(-(-size // 8) * 8, 0xA5, np.uint8)
        defined = None
        if isinstance(content, int):
            defined = np.zeros(data.size // 2, bool)
        else:
            data[:size] = np.ascontiguousarray(content).reshape(-1).view(np.uint8)
        self._allocations.append(Allocation(name, base, size, data, defined))
        self._bases.append(base)
        return base

    def read(self, name: str, dtype: Any = np.uint8) -> np.ndarray:
        """Copy an allocation as an array of a dtype."""
        found = self.named(name)
        return found.data[: found.size].view(dtype).copy()

    def named(self, name: str) -> Allocation:
        return next(each for each in self._allocations if each.name == name)

    def begin(self) -> None:
        """Begin a launch: all earlier writes are visible."""
        for each in self._allocations:
            each.written = None
        self._hidden.clear()
        self._clocks.clear()
        self._synchronised.clear()
        self.groups.clear()

    def end(self) -> None:
        """End a launch: all its writes are visible, and its arguments are freed."""
        self.begin()
        self._allocations.pop()
        self._bases.pop()

    def find(self, address: int, size: int) -> Allocation:
        """Return the allocation of a range of bytes, or raise."""
        at = bisect.bisect_right(self._bases, address) - 1
        if at >= 0:
            found = self._allocations[at]
            if found.base <= address and address + size <= found.base + found.size:
                return found
            raise Fault(
                "bounds",
                f"{size} bytes at {address:#x}: {address - found.base} bytes behind the start of {found.name} ({found.size} bytes)",
            )
        raise Fault("bounds", f"{size} bytes at {address:#x}: below every allocation")

    def _parts(self, addresses: np.ndarray, size: int) -> list[tuple[Allocation, np.ndarray]]:
        """Yield the allocations of addresses with the indices of their addresses."""
        low, high = int(addresses.min()), int(addresses.max())
        first = self.find(low, size)
        if high + size <= first.base + first.size:
            return [(first, np.arange(addresses.size))]
        parts, rest = [], np.arange(addresses.size)
        while rest.size:
            found = self.find(int(addresses[rest].min()), size)
            inside = addresses[rest] + np.uint64(size) <= np.uint64(found.base + found.size)
            parts.append((found, rest[inside]))
            if not inside.any():
                self.find(int(addresses[rest].min()), size)
                raise Fault("bounds", f"an access of {size} bytes leaves {found.name}")
            rest = rest[~inside]
        return parts

    def check(self, addresses: np.ndarray, size: int) -> None:
        """Raise where an access is outside every allocation."""
        if addresses.size:
            self._parts(addresses, size)

    def barrier(self, waves: Iterable[int]) -> None:
        """Share the knowledge of waves at a barrier."""
        self.time += 1
        known: dict[int, int] = {}
        for wave in waves:
            _join(known, self._clocks.get(wave, {}))
        for wave in waves:
            known[wave] = self.time
        for wave in waves:
            self._clocks[wave] = dict(known)

    def synchronise(self, address: int, access: Access, since: int | None = None) -> None:
        """Acquire what writers of an address knew; with ``since``, release what the wave knew then."""
        clock = self._clocks.setdefault(access.wave, {})
        _join(clock, self._synchronised.get(address, {}))
        if since is not None:
            _join(clock, {access.wave: since})
            _join(self._synchronised.setdefault(address, {}), clock)

    def load(self, addresses: np.ndarray, size: int, access: Access, *, atomic: bool = False) -> np.ndarray:
        """Return bytes [n, size] at addresses [n]."""
        out = np.empty((addresses.size, size), np.uint8)
        if not addresses.size:
            return out
        meets = self._meets(addresses, access) if access.device and self._synchronised else None
        for found, places in self._parts(addresses, size):
            start = (addresses[places] - np.uint64(found.base)).astype(np.int64)
            out[places] = found.data[start[:, None] + np.arange(size)]
            self._judge_load(found, _halves(start if meets is None else start[~meets[places]], size), access, atomic)
        return out

    def _meets(self, addresses: np.ndarray, access: Access) -> np.ndarray:
        """Return the addresses whose loads synchronize."""
        found = np.isin(addresses, np.fromiter(self._synchronised, np.uint64))
        for address in addresses[found]:
            self.synchronise(int(address), access)
        return found

    def store(self, addresses: np.ndarray, values: np.ndarray, access: Access, *, atomic: bool = False) -> None:
        """Write bytes [n, size]; the highest lane wins among equal addresses."""
        if not addresses.size:
            return
        size = values.shape[1]
        self.time += 1
        for found, places in self._parts(addresses, size):
            start = (addresses[places] - np.uint64(found.base)).astype(np.int64)
            halves = _halves(start, size)
            written = found.written = found.written or Writes(found.data.size // 2)
            if not atomic and access.judged:
                self._judge_store(found, written, halves, access)
            found.data[start[:, None] + np.arange(size)] = values[places]
            if found.defined is not None:
                found.defined[halves] = True
            written.writer[halves], written.done[halves], written.atomic[halves] = access.wave, self.time, atomic
            visible = atomic or access.device
            written.publisher[halves], written.seen[halves] = access.wave, self.time if visible else HIDDEN
            if not visible:
                self._hidden.setdefault(access.group, []).append((found, halves))

    def publish(self, access: Access) -> None:
        """Make a workgroup's writes visible to all (`buffer_wbl2 sc1`)."""
        self.time += 1
        for found, halves in self._hidden.pop(access.group, []):
            assert found.written is not None
            mine = halves[(self._groups_of(found.written.writer[halves]) == access.group) & (found.written.seen[halves] == HIDDEN)]
            found.written.seen[mine], found.written.publisher[mine] = self.time, access.wave
        self._clocks.setdefault(access.wave, {})[access.wave] = self.time

    def _groups_of(self, waves: np.ndarray) -> np.ndarray:
        return np.asarray(self.groups)[waves]

    def _unordered(self, written: Writes, halves: np.ndarray, access: Access) -> np.ndarray:
        """Return writes of other waves that this wave's clock does not cover."""
        foreign = halves[(written.writer[halves] >= 0) & (written.writer[halves] != access.wave)]
        if not foreign.size:
            return foreign
        same = self._groups_of(written.writer[foreign]) == access.group
        who = np.where(same, written.writer[foreign], written.publisher[foreign])
        when = np.where(same, written.done[foreign], written.seen[foreign])
        clock = self._clocks.get(access.wave, {})
        known = np.zeros(len(self.groups), np.int64)
        known[list(clock)] = list(clock.values())
        return foreign[when > known[who]]

    def _judge_load(self, found: Allocation, halves: np.ndarray, access: Access, atomic: bool) -> None:
        if found.defined is not None and not found.defined[halves].all():
            raise Fault("undefined", f"{found.name}: byte {2 * int(halves[~found.defined[halves]][0])} was never written")
        written = found.written
        if written is None or not access.judged:
            return
        if atomic:
            halves = halves[~written.atomic[halves]]
        unordered = self._unordered(written, halves, access)
        if unordered.size:
            first = unordered[0]
            what = f"{found.name}: byte {2 * int(first)} was written by"
            if written.seen[first] == HIDDEN and self.groups[written.writer[first]] != access.group:
                raise Fault("coherence", f"{what} another workgroup without sc1 and no buffer_wbl2 sc1 followed")
            raise Fault("race", f"{what} wave {written.writer[first]}, and nothing orders this load behind it")
        others = halves[(written.writer[halves] >= 0) & (written.writer[halves] != access.wave)]
        others = others[self._groups_of(written.writer[others]) != access.group]
        if not access.device and (written.seen[others] > access.fresh).any():
            stale = 2 * int(others[written.seen[others] > access.fresh][0])
            why = "this load has no sc1, nor was buffer_inv sc1 waited for"
            raise Fault("coherence", f"{found.name}: byte {stale} was written by another workgroup: {why}")

    def _judge_store(self, found: Allocation, written: Writes, halves: np.ndarray, access: Access) -> None:
        racing = self._unordered(written, halves, access)
        if racing.size:
            raise Fault("race", f"{found.name}: byte {2 * int(racing[0])} was written by another wave, and nothing orders the two writes")


def _join(clock: dict[int, int], other: dict[int, int]) -> None:
    """Return the later time of each wave."""
    for wave, time in other.items():
        clock[wave] = max(clock.get(wave, 0), time)


def _halves(start: np.ndarray, size: int) -> np.ndarray:
    """Return the 2-byte entries of accesses."""
    first = start // 2
    return np.unique((first[:, None] + np.arange((size + 1) // 2 + (1 if (start % 2).any() else 0))).reshape(-1))
