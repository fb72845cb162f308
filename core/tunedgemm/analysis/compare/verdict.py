"""Results of a comparison, and the rule that decides whether a row is replaced."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs

from tunedgemm.device import Device
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Problem
from tunedgemm.table.match import Match
from tunedgemm.table.untuned import Untuned, untuned_text

#: Noise of a ratio of times from different rounds, since clocks fall under load.
SEQUENTIAL = 0.10


@attrs.frozen
class Served:
    """The result of dispatch on one shape.

    Attributes:
        shape: the shape.
        solution: the solution that dispatch ran; None without a choice.
        status: ``ok``, ``mismatch:err_ratio=…`` or ``error:…``.
        us: median microseconds of one call; 0 if not timed.
        noise: relative half width of the median's 95 % confidence interval.
        samples: number of rounds behind the median.
        err_ratio: fraction of elements outside the op's tolerance.
        origin: source of the choice: ``table``, ``heuristic`` or ``builtin``.
        why: the row's file and line, or the backend of the heuristic.
        match: the match of the row; None without a row.
        detail: details of a status other than ``ok``.
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
        """Check whether the call ran and passed verification."""
        return self.status == "ok"


@attrs.frozen
class Checked:
    """The result of `run_config`.

    Attributes:
        op: name of the op.
        device: the device it ran on.
        tables: the files whose rows were checked; () for the configured tables.
        served: a result for each shape.
        notes: unreadable lines of the table, and rows of other devices.
        left_out: lines of the input that are not shapes.
    """

    op: str
    device: Device
    tables: tuple[Path, ...]
    served: tuple[Served, ...]
    notes: tuple[str, ...] = ()
    left_out: tuple[Problem, ...] = ()

    @property
    def kind(self) -> str:
        """Return AITER's word for the tables: ``tuned``, or ``default`` for the configured ones."""
        return "tuned" if self.tables else "default"

    @property
    def failed(self) -> Sequence[Served]:
        """Return the results that are not right."""
        return [served for served in self.served if not served.ok]

    @property
    def repro(self) -> str:
        """Return the failed shapes as the text of an untuned CSV, or ""."""
        return untuned_text(op_named(self.op), [Untuned(served.shape) for served in self.failed]) if self.failed else ""


@attrs.frozen
class Change:
    """One shape before and after tuning.

    Attributes:
        before, after: results with the old and with the new row.
        ratio: median of time after / time before within rounds; 0 if either was not timed.
        noise: half width of the ratio's 95 % confidence interval.
        count: calls of the shape in the workload.
        decision: ``threshold_met``, ``no_baseline`` or ``skip``.
        reason: the reason for the decision.
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
        """Return the shape."""
        return self.after.shape

    @property
    def improvement_pct(self) -> float:
        """Return the time saved in percent, as in AITER."""
        return (1.0 - self.ratio) * 100.0 if self.ratio else 0.0


@attrs.frozen
class Compared:
    """The result of `compare`.

    Attributes:
        device: the device that timed both sides.
        output: the table to improve.
        candidate: the table that tuning wrote.
        report: the file with the readable table.
        changes: a change for each tuned shape.
        failed_tuning: shapes for which no solution passed.
        skipped: untuned shapes that the table has already.
        unbegun: untuned shapes for which the budget did not suffice.
        lost: shapes without a working device.
        least: the smallest improvement in percent that replaces a row.
        update: whether to replace rows.
        left_out: lines of the input that are not shapes.
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
    left_out: tuple[Problem, ...] = ()

    @property
    def failed(self) -> Sequence[Shape]:
        """Return the shapes that were not tuned, or fail verification with the new row."""
        return [*self.failed_tuning, *self.lost, *(change.shape for change in self.changes if not change.after.ok)]


def decide(change: Change, least: float) -> Change:
    """Decide by AITER's rule, with a noise band, whether the new row replaces the old one.

    Args:
        change: both sides, their ratio and its noise.
        least: the smallest improvement in percent (``--min_improvement_pct``).

    Returns:
        The change with its decision and the reason. ``no_baseline``: only the new side is right.
        ``threshold_met``: both are, and the improvement is at least *least* and exceeds the noise.
        ``skip``: anything else.
    """
    before, after, gain, noise = change.before, change.after, change.improvement_pct, change.noise * 100.0
    if not after.ok:
        return attrs.evolve(change, decision="skip", reason=f"not right with the new row: {after.status}")
    if not before.ok:
        return attrs.evolve(change, decision="no_baseline", reason=f"before: {before.status}")
    if before.solution == after.solution:
        return attrs.evolve(change, decision="skip", reason="the same solution serves it")
    if abs(gain) <= noise:
        return attrs.evolve(change, decision="skip", reason=f"a tie: {gain:+.1f} % is within the noise of {noise:.1f} %")
    if gain < least:
        reason = "it is slower" if gain < 0 else f"less than {least:g} %"
        return attrs.evolve(change, decision="skip", reason=reason)
    return attrs.evolve(change, decision="threshold_met", reason=f"{gain:.1f} % of at least {least:g} %")
