"""Coverage as a whole: all entries, what they sum up to, why rows are not used, and what to tune next."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import attrs

from tunedgemm.analysis.coverage.proposal import Next, propose
from tunedgemm.analysis.coverage.result import Entry, Group, Unused, layer_of
from tunedgemm.device import Device
from tunedgemm.errors import UserError
from tunedgemm.table.csvfile import Problem

#: What a list of entries is summed up by.
BY = ("op", "layer", "shape")


@attrs.frozen
class Coverage(Group):
    """What answers the calls of a workload on a device.

    Attributes:
        name: what was judged, in words.
        entries: a shape each, the longest time first.
        device: where.
        paths: the files with the captured calls.
        problems: lines of them that could not be read.
        notes: what else is to be said.
    """

    device: Device
    paths: tuple[Path, ...] = ()
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ops(self) -> tuple[str, ...]:
        """The ops that are called."""
        return tuple(dict.fromkeys(entry.shape.op for entry in self.entries))

    def by(self, what: str) -> tuple[Group, ...]:
        """The entries summed up by ``op``, ``layer`` (all of a shape but M) or ``shape``, the longest time first.

        Raises:
            UserError: *what* is none of these.
        """
        if what not in BY:
            raise UserError(f"coverage is summed up by {', '.join(BY)} (got {what!r})")
        found: dict[object, list[Entry]] = {}
        for entry in self.entries:
            key = entry.shape.op if what == "op" else entry.shape if what == "shape" else layer_of(entry.shape)
            found.setdefault(key, []).append(entry)
        groups = (Group(_name(what, entries), tuple(entries)) for entries in found.values())
        return tuple(sorted(groups, key=lambda group: (-group.time, group.name)))

    def unused(self) -> tuple[Unused, ...]:
        """Why rows that are there are not used, and how much would call them; what stands for the longest time first."""
        found: dict[tuple[str, str], list[Entry]] = {}
        for entry in self.entries:
            for libtype, reason in dict.fromkeys((passed.solution.libtype, passed.reason) for passed in entry.passed):
                found.setdefault((libtype, reason), []).append(entry)
        unused = (Unused(*key, _sum(entries, "calls"), _sum(entries, "time")) for key, entries in found.items())
        return tuple(sorted(unused, key=lambda one: (-one.time, one.libtype, one.reason)))

    def next(self, most: int = 10) -> list[Next]:
        """The layers to tune next, at most so many, those that stand for the longest time first; see `propose`."""
        return propose(self.entries, most)

    def rows(self, *words: str, by: str = "time") -> float:
        """The share of the calls, or time, whose best row is of one of these words, used or not: what all backends would answer."""
        total = getattr(self, by)
        part: float = sum(getattr(entry, by) for entry in self.entries if entry.row in words)
        return part / total if total else 0.0


def _sum(entries: Iterable[Entry], what: str) -> int:
    total: int = sum(getattr(entry, what) for entry in entries)
    return total


def _name(what: str, entries: list[Entry]) -> str:
    """A group in words: what the file calls it, and what tells it from others."""
    shape = entries[0].shape
    if what == "op":
        return shape.op
    told = str(shape) if what == "shape" else str(layer_of(shape)).replace("M=0 ", "", 1)
    layers = list(dict.fromkeys(entry.layer for entry in entries if entry.layer))
    return told + (f" ({', '.join(layers)})" if layers else "")
