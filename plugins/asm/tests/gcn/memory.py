"""Global memory of a launch: named allocations at made-up addresses, and who wrote what of them, for the rules between workgroups."""

from __future__ import annotations

import bisect
from typing import Any

import attrs
import numpy as np

from .fault import Fault

_FIRST, _STEP = 0x7F00_0000_0000, 1 << 24
#: Of a byte that was written but that other workgroups may not see yet.
HIDDEN = np.iinfo(np.int64).max


@attrs.define(eq=False)
class Allocation:
    """Bytes at an address.

    Arrays of one entry for each 2 bytes say which wave wrote it, in which epoch of its workgroup, and since when other workgroups may see
    it; they are made at the first write.
    """

    name: str
    base: int
    size: int
    data: np.ndarray
    defined: np.ndarray | None
    writer: np.ndarray | None = None
    epoch: np.ndarray | None = None
    seen: np.ndarray | None = None

    def track(self) -> None:
        if self.writer is None:
            halves = self.data.size // 2
            self.writer = np.full(halves, -1, np.int32)
            self.epoch = np.zeros(halves, np.int32)
            self.seen = np.full(halves, -1, np.int64)


@attrs.define(eq=False)
class Access:
    """Who asks: wave and workgroup by number, the workgroup's epoch (barriers so far), and since when the wave's view is fresh."""

    wave: int
    group: int
    epoch: int
    fresh: int
    device: bool = False
    coherent: bool = True


class Memory:
    """Global memory.

    ``place`` copies an array, or leaves so many bytes undefined, and returns the address; ``read`` gives back what is there.
    """

    def __init__(self) -> None:
        self._allocations: list[Allocation] = []
        self._bases: list[int] = []
        self.time = 0
        #: Which workgroup a wave's number belongs to, by number.
        self.groups: list[int] = []
        #: Of each workgroup, what it wrote that others may not see yet.
        self._hidden: dict[int, list[tuple[Allocation, np.ndarray]]] = {}

    def place(self, name: str, content: np.ndarray | int, offset: int = 0) -> int:
        """Makes an allocation of an array's bytes, or of a number of undefined bytes, ``offset`` bytes behind a multiple of 16 MiB."""
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
        """A copy of an allocation's bytes as an array of a dtype."""
        found = self.named(name)
        return found.data[: found.size].view(dtype).copy()

    def named(self, name: str) -> Allocation:
        return next(each for each in self._allocations if each.name == name)

    def begin(self) -> None:
        """A launch begins: all that was written before is seen by all."""
        for each in self._allocations:
            each.writer = each.epoch = each.seen = None
        self._hidden.clear()
        self.groups.clear()

    def end(self) -> None:
        """A launch has ended: all that it wrote is seen by all, and its arguments are gone."""
        self.begin()
        self._allocations.pop()
        self._bases.pop()

    def find(self, address: int, size: int) -> Allocation:
        """The allocation that a range of bytes is in; Fault where it is in none."""
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
        """Allocations that addresses are in, each with the places of its addresses."""
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
        """Fault where an access of ``size`` bytes at one of the addresses is outside every allocation."""
        if addresses.size:
            self._parts(addresses, size)

    def load(self, addresses: np.ndarray, size: int, access: Access) -> np.ndarray:
        """Bytes [n, size] at addresses [n], uint64."""
        out = np.empty((addresses.size, size), np.uint8)
        if not addresses.size:
            return out
        for found, places in self._parts(addresses, size):
            start = (addresses[places] - np.uint64(found.base)).astype(np.int64)
            out[places] = found.data[start[:, None] + np.arange(size)]
            self._judge_load(found, _halves(start, size), access)
        return out

    def store(self, addresses: np.ndarray, values: np.ndarray, access: Access, *, atomic: bool = False) -> None:
        """Writes bytes [n, size] to addresses [n]; the highest of equal addresses wins."""
        if not addresses.size:
            return
        size = values.shape[1]
        self.time += 1
        for found, places in self._parts(addresses, size):
            start = (addresses[places] - np.uint64(found.base)).astype(np.int64)
            halves = _halves(start, size)
            found.track()
            assert found.writer is not None
            assert found.epoch is not None
            assert found.seen is not None
            self._judge_store(found, halves, access, atomic)
            found.data[start[:, None] + np.arange(size)] = values[places]
            if found.defined is not None:
                found.defined[halves] = True
            found.writer[halves], found.epoch[halves] = access.wave, access.epoch
            seen = atomic or access.device
            found.seen[halves] = self.time if seen else HIDDEN
            if not seen:
                self._hidden.setdefault(access.group, []).append((found, halves))

    def publish(self, group: int) -> None:
        """What a workgroup wrote becomes visible to all (`buffer_wbl2 sc1`)."""
        self.time += 1
        for found, halves in self._hidden.pop(group, []):
            assert found.writer is not None
            assert found.seen is not None
            mine = halves[(np.asarray(self.groups)[found.writer[halves]] == group) & (found.seen[halves] == HIDDEN)]
            found.seen[mine] = self.time

    def _judge_load(self, found: Allocation, halves: np.ndarray, access: Access) -> None:
        if found.defined is not None and not found.defined[halves].all():
            raise Fault("undefined", f"{found.name}: byte {2 * int(halves[~found.defined[halves]][0])} was never written")
        if found.writer is None or not access.coherent:
            return
        assert found.seen is not None
        assert found.epoch is not None
        foreign = halves[(found.writer[halves] >= 0) & (found.writer[halves] != access.wave)]
        if not foreign.size:
            return
        same = np.asarray(self.groups)[found.writer[foreign]] == access.group
        racing = foreign[same & (found.epoch[foreign] >= access.epoch)]
        if racing.size:
            raise Fault(
                "race", f"{found.name}: byte {2 * int(racing[0])} was written by another wave of the workgroup since the last barrier"
            )
        others = foreign[~same]
        stale = others[found.seen[others] > (self.time if access.device else access.fresh)]
        if stale.size:
            why = (
                "without sc1 and no buffer_wbl2 sc1 followed"
                if found.seen[stale[0]] == HIDDEN
                else "and this load has no sc1, nor was buffer_inv sc1 waited for since"
            )
            raise Fault("coherence", f"{found.name}: byte {2 * int(stale[0])} was written by another workgroup {why}")

    def _judge_store(self, found: Allocation, halves: np.ndarray, access: Access, atomic: bool) -> None:
        if not access.coherent:
            return
        assert found.writer is not None
        assert found.seen is not None
        assert found.epoch is not None
        foreign = halves[(found.writer[halves] >= 0) & (found.writer[halves] != access.wave)]
        if not foreign.size:
            return
        same = np.asarray(self.groups)[found.writer[foreign]] == access.group
        racing = foreign[(same & (found.epoch[foreign] >= access.epoch)) | (~same & (found.seen[foreign] == HIDDEN))]
        if racing.size and not atomic:
            raise Fault("race", f"{found.name}: byte {2 * int(racing[0])} was written by another wave, and nothing orders the two writes")


def _halves(start: np.ndarray, size: int) -> np.ndarray:
    """The entries of 2 bytes that accesses touch."""
    first = start // 2
    return np.unique((first[:, None] + np.arange((size + 1) // 2 + (1 if (start % 2).any() else 0))).reshape(-1))
