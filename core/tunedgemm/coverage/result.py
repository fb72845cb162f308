"""What coverage finds: an entry for each shape, and the shares, regrets and reasons that follow from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import attrs

from tunedgemm.csvfile import Problem
from tunedgemm.device import Device
from tunedgemm.errors import UserError
from tunedgemm.row import key_shape
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution

#: word -> what it says of how calls are answered, best first; the words of padded rows are the ladder's
WORDS: Mapping[str, str] = MappingProxyType(
    {
        "exact": "a row of exactly this M",
        "pinned": "a row that pins one solution for every M",
        "fine": "a row of the next finely padded M",
        "coarse": "a row of the next power of two, or of 8192 below",
        "padded": "a row of the next power of two",
        "tier": "a row of the tier below",
        "other device": "a row of another device of the same gfx and cu_num",
        "heuristic": "a backend's own choice",
        "fallback": "torch's own call",
        "refused": "nothing runs",
    }
)
#: Answers of a row that was tuned for the shape, as far as it can be: what ``--min-exact`` asks for.
TUNED = ("exact", "pinned")
#: Answers of a row that was tuned at another M.
PADDED = ("fine", "coarse", "padded", "tier")
#: Answers of nothing that was tuned on this device.
UNTUNED = ("other device", "heuristic", "fallback")

#: word -> where the time of a call comes from, best first
SOURCES: Mapping[str, str] = MappingProxyType(
    {
        "measured": "what runs, timed",
        "row": "the row's own time",
        "trial": "a trial of that solution at that shape",
        "against": "a row of that solution and shape in another table",
        "padded row": "the row's time at its own M",
        "guess": "a guess from bytes and operations",
    }
)
#: What a list of entries is summed up by.
BY = ("op", "layer", "shape")


def _not_negative(_: object, attribute: attrs.Attribute, value: float) -> None:
    if not 0 <= value < math.inf:
        raise UserError(f"{attribute.name!r} must be a number of at least 0 (got {value})")


@attrs.frozen
class Passed:
    """A row that would answer a shape and is not used.

    Attributes:
        solution: what it names.
        word: how its M relates to the one asked for.
        reason: why it is not used.
    """

    solution: Solution
    word: str = attrs.field(validator=attrs.validators.in_(WORDS))
    reason: str


@attrs.frozen
class Entry:
    """A shape that a workload calls, and what answers it.

    Attributes:
        shape: the shape, as tables know it.
        count, graph: calls that ran at once, and that were recorded into graphs.
        calls: all calls, those of graphs once for each replay.
        how: a word of `WORDS`.
        solution: what runs; of a refused shape the last that was tried.
        us: microseconds of one call.
        us_from: a word of `SOURCES`.
        best_us: microseconds of the fastest solution that is known at this very shape on this device; 0 where none is.
        best: that solution, and where its time is from.
        why: where the answer comes from, or why there is none.
        row_m: M of the row that answers; -1 where none does.
        passed: rows that would answer before it and are not used, best first.
        layer: what multiplies so, where the file says it.
    """

    shape: Shape
    count: int = attrs.field(validator=_not_negative)
    graph: int = attrs.field(validator=_not_negative)
    calls: int = attrs.field(validator=_not_negative)
    how: str = attrs.field(validator=attrs.validators.in_(WORDS))
    solution: Solution
    us: float = attrs.field(validator=_not_negative)
    us_from: str = attrs.field(validator=attrs.validators.in_(SOURCES))
    best_us: float = attrs.field(default=0.0, validator=_not_negative)
    best: str = ""
    why: str = ""
    row_m: int = -1
    passed: tuple[Passed, ...] = ()
    layer: str = ""

    @property
    def time(self) -> float:
        """Microseconds of all calls."""
        return self.calls * self.us

    @property
    def regret(self) -> float | None:
        """How much longer a call takes than with the best that is known at its shape, as a share of that; None where either is unknown.

        The time of a row at its own, larger M stands for the one at this M where that is not known; see `us_from`.
        """
        return max(self.us / self.best_us - 1.0, 0.0) if self.best_us and self.us_from != "guess" else None

    @property
    def lost(self) -> float:
        """Microseconds of all calls that tuning may save at most: what the best known leaves of them, else all."""
        return self.time if self.regret is None else self.calls * max(self.us - self.best_us, 0.0)

    @property
    def row(self) -> str:
        """The word of the best row that there is for the shape, used or not; "" where there is none."""
        if self.passed:
            return self.passed[0].word
        return self.how if self.row_m >= 0 else ""


@attrs.frozen
class Regret:
    """What calls cost more than with the best that is known at their shapes.

    Attributes:
        weighted: their time over that of the best, less 1.
        worst: the entry with the largest regret.
        calls: those for which it is known.
        of: those that were asked about.
    """

    weighted: float
    worst: Entry
    calls: int
    of: int


@attrs.frozen
class Unused:
    """Rows of one libtype that are not used, for one reason: a shape with such a row has another answer."""

    libtype: str
    reason: str
    calls: int
    time: float


@attrs.frozen
class Group:
    """Entries that belong together, and their name."""

    name: str
    entries: tuple[Entry, ...]

    @property
    def calls(self) -> int:
        """Their calls."""
        return sum(entry.calls for entry in self.entries)

    @property
    def time(self) -> float:
        """Microseconds of all their calls."""
        return sum(entry.time for entry in self.entries)

    def share(self, *how: str, by: str = "time") -> float:
        """The share of their calls, or time, that is answered in one of these ways, 0 to 1.

        Raises:
            UserError: *by* is neither ``time`` nor ``calls``, or no such way is known.
        """
        if by not in ("time", "calls"):
            raise UserError(f"a share is one by 'time' or by 'calls' (got {by!r})")
        if unknown := [word for word in how if word not in WORDS]:
            raise UserError(f"calls are answered by {', '.join(WORDS)} (got {unknown[0]!r})")
        total = getattr(self, by)
        part: float = sum(getattr(entry, by) for entry in self.entries if entry.how in how)
        return part / total if total else 0.0

    def regret(self, *how: str) -> Regret | None:
        """What calls that are answered in one of these ways, by a padded row unless said, lose; None where it is known of none."""
        asked = [entry for entry in self.entries if entry.how in (how or PADDED) and entry.calls]
        known = [entry for entry in asked if entry.regret is not None]
        if not known:
            return None
        best = sum(entry.calls * entry.best_us for entry in known)
        spent = best + sum(entry.lost for entry in known)
        worst = max(known, key=lambda entry: (entry.regret or 0.0, entry.lost))
        return Regret(spent / best - 1.0, worst, sum(entry.calls for entry in known), sum(entry.calls for entry in asked))


def layer_of(shape: Shape) -> Shape:
    """All of a shape but M, as a shape with M = 0."""
    return key_shape(attrs.evolve(shape, m=0))


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
