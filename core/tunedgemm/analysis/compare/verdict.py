"""What comparing found, and the rule by which a row of a table is replaced."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs

from tunedgemm.device import Device
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Untuned, untuned_text
from tunedgemm.table.lookup import Match

#: How far apart times may be that were not taken in the same rounds: clocks fall under load, and with other neighbours.
SEQUENTIAL = 0.10


@attrs.frozen
class Served:
    """What became of the production op on one shape.

    Attributes:
        shape: what was asked of it.
        solution: what dispatch ran; None where it came to no choice.
        status: ``ok``, ``mismatch:err_ratio=…`` or ``error:…``.
        us: median microseconds of one call; 0 where it was not timed.
        noise: half width of the median's 95 % interval, relative to it.
        samples: how many rounds the median is over.
        err_ratio: share of elements outside the op's tolerance.
        origin: where the choice comes from: ``table``, ``heuristic`` or ``builtin``.
        why: the row's file and line, or whose choice it is.
        match: the row; None where it is no row's choice.
        detail: more about a status that is not ``ok``.
    """

    shape: Shape
    solution: Solution | None = None
    status: str = "ok"
    us: float = 0.0
    noise: float = 0.0
    samples: int = 0
    err_ratio: float = 0.0
    origin: str = ""
    why: str = ""
    match: Match | None = None
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether it ran and was right."""
        return self.status == "ok"


@attrs.frozen
class Checked:
    """What `run_config` found.

    Attributes:
        op: name of the op.
        device: where it ran.
        table: the file whose rows were looked at; None where the tables as configured were.
        served: a shape each.
        notes: what else is to be said about the table: lines that cannot be read, rows of other
            devices.
    """

    op: str
    device: Device
    table: Path | None
    served: tuple[Served, ...]
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> Sequence[Served]:
        """The shapes that went wrong."""
        return [one for one in self.served if not one.ok]

    @property
    def repro(self) -> str:
        """The failed shapes as an untuned CSV, to be pasted into a file; "" where none failed."""
        return untuned_text(op_named(self.op), [Untuned(one.shape) for one in self.failed]) if self.failed else ""


@attrs.frozen
class Change:
    """One shape before and after tuning.

    Attributes:
        before, after: the production op with the table as it is, and as it would be.
        ratio: time after over time before, the median over the rounds in which both were timed; 0
            where either was not.
        noise: half width of the ratio's 95 % interval.
        count: how often the workload calls the shape.
        decision: ``threshold_met``, ``no_baseline`` or ``skip``.
        reason: why, in words.
        updated: whether the table's row was replaced.
    """

    before: Served
    after: Served
    ratio: float = 0.0
    noise: float = 0.0
    count: int = 1
    decision: str = attrs.field(default="skip", validator=attrs.validators.in_(("threshold_met", "no_baseline", "skip")))
    reason: str = ""
    updated: bool = False

    @property
    def shape(self) -> Shape:
        """The shape."""
        return self.after.shape

    @property
    def improvement_pct(self) -> float:
        """AITER's figure: what the time fell by, in percent of the time before."""
        return (1.0 - self.ratio) * 100.0 if self.ratio else 0.0


@attrs.frozen
class Compared:
    """What `compare` found.

    Attributes:
        device: where both were timed.
        output: the table that was to be improved.
        candidate: the table that tuning wrote.
        report: the file with the readable table.
        changes: a tuned shape each.
        failed_tuning: shapes for which no solution passed.
        skipped: shapes that were not tuned: the table has them already.
        unbegun: shapes that the budget did not suffice for.
        lost: shapes for which no working device was left.
        least: the smallest improvement in percent that replaces a row.
        update: whether rows were to be replaced.
    """

    device: Device
    output: Path
    candidate: Path
    report: Path
    changes: tuple[Change, ...]
    failed_tuning: tuple[Shape, ...] = ()
    skipped: tuple[Shape, ...] = ()
    unbegun: tuple[Shape, ...] = ()
    lost: tuple[Shape, ...] = ()
    least: float = 3.0
    update: bool = False

    @property
    def failed(self) -> Sequence[Shape]:
        """The shapes for which tuning found nothing or had no device, or for which the op is not right with what it found."""
        return [*self.failed_tuning, *self.lost, *(change.shape for change in self.changes if not change.after.ok)]


def decide(change: Change, least: float) -> Change:
    """AITER's rule with the noise band: does the new row replace the old?

    Args:
        change: both sides, their ratio and its noise.
        least: the smallest improvement in percent (``--min_improvement_pct``).

    Returns:
        The change with its decision and the reason: ``no_baseline`` where only the op after is
        right, ``threshold_met`` where both are and the improvement is at least *least* and more
        than the noise, else ``skip``.
    """
    before, after, gained, noise = change.before, change.after, change.improvement_pct, change.noise * 100.0
    if not after.ok:
        return attrs.evolve(change, decision="skip", reason=f"not right with the new row: {after.status}")
    if not before.ok:
        return attrs.evolve(change, decision="no_baseline", reason=f"before: {before.status}")
    if before.solution == after.solution:
        return attrs.evolve(change, decision="skip", reason="the same solution serves it")
    if abs(gained) <= noise:
        return attrs.evolve(change, decision="skip", reason=f"a tie: {gained:+.1f} % is within the noise of {noise:.1f} %")
    if gained < least:
        reason = "it is slower" if gained < 0 else f"less than {least:g} %"
        return attrs.evolve(change, decision="skip", reason=reason)
    return attrs.evolve(change, decision="threshold_met", reason=f"{gained:.1f} % of at least {least:g} %")
