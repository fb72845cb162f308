"""What coverage finds: an entry for each shape, and the shares and regrets of several of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import attrs

from tunedgemm.errors import UserError
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.row import key_shape

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
        "unbiased": "a row of the product without its bias",
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
UNTUNED = ("other device", "unbiased", "heuristic", "fallback")

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
        best_us: microseconds of the fastest solution that is known at this very shape on this
            device; 0 where none is.
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

        The time of a row at its own, larger M stands for the one at this M where that is not known;
        see `us_from`.
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
