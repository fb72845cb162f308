"""Results of coverage: an entry for each shape, and the shares and regrets of groups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import attrs

from tunedgemm.errors import UserError
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.row import key_shape

#: word -> how the call is served, best first; the words of padded rows are those of `Op.padded_m`
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
#: Words of rows that were tuned for the shape, which ``--min-exact`` counts.
TUNED = ("exact", "pinned")
#: Words of rows that were tuned at another M.
PADDED = ("fine", "coarse", "padded", "tier")
#: Words of solutions that were not tuned for the shape on this device.
UNTUNED = ("other device", "unbiased", "heuristic", "fallback")

#: word -> source of a call's time, best first
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
        raise UserError(f"{attribute.name!r}: must be a number of at least 0 (got {value})")


@attrs.frozen
class Passed:
    """A row that could serve a shape and is not used.

    Attributes:
        solution: the row's solution.
        word: the relation of its M to the shape's, a word of `WORDS`.
        reason: why it is not used.
    """

    solution: Solution
    word: str = attrs.field(validator=attrs.validators.in_(WORDS))
    reason: str


@attrs.frozen
class Entry:
    """A shape that a workload calls, and the solution that serves it.

    Attributes:
        shape: the shape, as a key of tables.
        count, graph: calls that ran immediately, and calls recorded into graphs.
        calls: all calls, those of graphs once for each replay.
        how: a word of `WORDS`.
        solution: the solution that runs; for a refused shape the last one tried.
        us: microseconds of one call.
        us_from: a word of `SOURCES`.
        best_us: microseconds of the fastest known solution at this exact shape on this device; 0 if
            none is known.
        best: that solution, and the source of its time.
        why: the source of the choice, or the reason of the refusal.
        row_m: M of the row that serves; -1 without one.
        passed: unused rows that would serve first, best first.
        layer: the layer's name, if the file has it.
        table_layer: the layer of tables whose row serves, in words; "" without one.
        libver: the library version that this row was tuned with, "" where it has none.
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
    table_layer: str = ""
    libver: str = ""

    @property
    def time(self) -> float:
        """Return the microseconds of all calls."""
        return self.calls * self.us

    @property
    def regret(self) -> float | None:
        """Return the extra time over the best known solution, relative to its time.

        It is None if either time is unknown. A padded row's time at its larger M replaces an
        unknown time at this M; see `us_from`.
        """
        return max(self.us / self.best_us - 1.0, 0.0) if self.best_us and self.us_from != "guess" else None

    @property
    def lost(self) -> float:
        """Return the most microseconds that tuning may save: those over the best known time, else all."""
        return self.time if self.regret is None else self.calls * max(self.us - self.best_us, 0.0)

    @property
    def row(self) -> str:
        """Return the word of the shape's best row, used or not; "" without a row."""
        if self.passed:
            return self.passed[0].word
        return self.how if self.row_m >= 0 else ""


@attrs.frozen
class Regret:
    """The extra time of calls over the best known solutions at their shapes.

    Attributes:
        weighted: their time over that of the best, less 1.
        worst: the entry with the largest regret.
        calls: the calls with a known regret.
        of: all calls of the group.
    """

    weighted: float
    worst: Entry
    calls: int
    of: int


@attrs.frozen
class Unused:
    """Rows of one libtype that are not used, for one reason, with the calls of their shapes."""

    libtype: str
    reason: str
    calls: int
    time: float


@attrs.frozen
class Group:
    """A named group of entries."""

    name: str
    entries: tuple[Entry, ...]

    @property
    def calls(self) -> int:
        """Return their calls."""
        return sum(entry.calls for entry in self.entries)

    @property
    def time(self) -> float:
        """Return the microseconds of all their calls."""
        return sum(entry.time for entry in self.entries)

    def share(self, *how: str, by: str = "time") -> float:
        """Return the share of their calls, or time, that is served in one of these ways, 0 to 1.

        Raises:
            UserError: *by* is neither ``time`` nor ``calls``, or a word is unknown.
        """
        if by not in ("time", "calls"):
            raise UserError(f"share: by must be 'time' or 'calls' (got {by!r})")
        if unknown := [word for word in how if word not in WORDS]:
            raise UserError(f"share: expected words of {', '.join(WORDS)} (got {unknown[0]!r})")
        total = getattr(self, by)
        part: float = sum(getattr(entry, by) for entry in self.entries if entry.how in how)
        return part / total if total else 0.0

    def regret(self, *how: str) -> Regret | None:
        """Return the regret of calls that are served in one of these ways, None if unknown.

        Args:
            how: words of `WORDS`; those of padded rows by default.
        """
        chosen = [entry for entry in self.entries if entry.how in (how or PADDED) and entry.calls]
        measured = [entry for entry in chosen if entry.regret is not None]
        if not measured:
            return None
        best = sum(entry.calls * entry.best_us for entry in measured)
        spent = best + sum(entry.lost for entry in measured)
        worst = max(measured, key=lambda entry: (entry.regret or 0.0, entry.lost))
        return Regret(spent / best - 1.0, worst, sum(entry.calls for entry in measured), sum(entry.calls for entry in chosen))


def layer_of(shape: Shape) -> Shape:
    """Return all of a shape but M, as a shape with M = 0."""
    return key_shape(attrs.evolve(shape, m=0))
