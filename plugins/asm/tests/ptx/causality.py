"""Check causality in global memory: a load must be ordered after the store that it reads. PTX ISA,
"Memory Consistency Model": an atomic passes what its thread knows from a release to an acquire that
reads it or a later value. A barrier shares the knowledge and stores of all threads of a warpgroup;
one thread releases for all.
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
    """Knowledge of one warpgroup, what a thread acquired since its last barrier, and its number of
    barriers.
    """

    known: Known = attrs.field(factory=dict)
    acquired: Known = attrs.field(factory=dict)
    barriers: int = 0


@attrs.define
class Causality:
    """State of one launch: warpgroups, the last store to a place, and what was released there."""

    groups: dict[int, Seen] = attrs.field(factory=dict)
    stores: dict[int, tuple[int, int]] = attrs.field(factory=dict)
    released: dict[int, Known] = attrs.field(factory=dict)

    def _of(self, group: int) -> Seen:
        return self.groups.setdefault(group, Seen())

    def meet(self, group: int) -> None:
        """Record that all threads of a warpgroup passed a barrier."""
        seen = self._of(group)
        _join(seen.known, seen.acquired)
        _join(seen.known, {group: seen.barriers})
        seen.barriers += 1

    def access(self, group: int, name: str, place: int) -> None:
        """Check one thread's access to a place in global memory."""
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
