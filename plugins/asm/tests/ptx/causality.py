"""Causality of what warp groups leave for each other in global memory: a load must be after the store that it reads.

PTX ISA, "Memory Consistency Model": an atomic that releases makes known, to one that acquires and reads it or one after it, what its thread
knows; a barrier makes known to all threads of a warp group what each of them knows, and what it stored. Of a warp group one thread alone
releases and acquires, so both are worth nothing without a barrier before and behind.
"""

from __future__ import annotations

import attrs

from .memory import Fault

#: What is known: of each warp group all that it stored up to one of its barriers, by their number.
Known = dict[int, int]


def _join(known: Known, other: Known) -> None:
    for group, barrier in other.items():
        known[group] = max(known.get(group, -1), barrier)


@attrs.define
class Seen:
    """What one warp group knows, what a thread of it acquired since its last barrier, and how many barriers it passed."""

    known: Known = attrs.field(factory=dict)
    acquired: Known = attrs.field(factory=dict)
    barriers: int = 0


@attrs.define
class Causality:
    """Of one launch: warp groups by their number, the last store to a place, what was released at another."""

    groups: dict[int, Seen] = attrs.field(factory=dict)
    stores: dict[int, tuple[int, int]] = attrs.field(factory=dict)
    released: dict[int, Known] = attrs.field(factory=dict)

    def _of(self, group: int) -> Seen:
        return self.groups.setdefault(group, Seen())

    def meet(self, group: int) -> None:
        """All threads of a warp group passed a barrier."""
        seen = self._of(group)
        _join(seen.known, seen.acquired)
        _join(seen.known, {group: seen.barriers})
        seen.barriers += 1

    def access(self, group: int, name: str, place: int) -> None:
        """One thread's instruction on a place in global memory that is stored and loaded as a whole."""
        seen = self._of(group)
        if name.startswith("st."):
            self.stores[place] = group, seen.barriers
        elif name.startswith("ld.relaxed") and place in self.stores:
            by, barrier = self.stores[place]
            if by != group and seen.known.get(by, -1) < barrier:
                raise Fault("a load that is not after the store of what it reads")
        if ".acq" in name:
            _join(seen.acquired, self.released.get(place, {}))
        if ".release." in name or ".acq_rel." in name:
            _join(self.released.setdefault(place, {}), seen.known)
