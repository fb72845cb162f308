"""Time a table's heaviest rows again, paired with torch's call: the cost of an upgrade."""

from __future__ import annotations

import functools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from tunedgemm.analysis.compare.measuring import Measuring, measuring
from tunedgemm.analysis.compare.production import Side, rows_for
from tunedgemm.analysis.compare.verdict import SEQUENTIAL, Change
from tunedgemm.analysis.estimate import Estimate
from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device, current_device
from tunedgemm.errors import TableError
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.table.csvfile import key_shape
from tunedgemm.table.folders import untuned_path
from tunedgemm.table.lookup import Table
from tunedgemm.table.row import Row
from tunedgemm.table.sheet import present
from tunedgemm.table.untuned import read_shapes
from tunedgemm.tuner.measure import COMPARISON_ROUNDS
from tunedgemm.tuner.select import DEFAULT_TIE, TIE
from tunedgemm.tuner.trial import Options

#: Fewest rows of unchanged libraries that show how this machine's speed differs from the table's.
CONTROLS = 5
#: Half width of a median's 95 % interval in median deviations over the root of their number (normal
#: distribution). Unlike order statistics it bears a third of slower rows.
MEDIAN_OF_SPREAD = 1.96 * 1.2533 * 1.4826
#: Device seconds of a pair, and seconds until calls count as hung and until binding does.
_SECONDS, _HUNG, _BINDING = 1.0, 30.0, 300.0


@attrs.frozen
class Retimed:
    """One row and its time today.

    Attributes:
        row: the row.
        calls: calls of the workload that it serves; 1 where they are unknown.
        change: torch's call and the row, in the same rounds.
        libver: the present version of the row's library; "" if unknown.
    """

    row: Row
    calls: int
    change: Change
    libver: str = ""

    @property
    def moved(self) -> bool:
        """Tell whether the row's library has another version now."""
        return bool(self.row.libver) and self.libver != self.row.libver

    @property
    def unchanged(self) -> bool:
        """Tell whether the row's library has the row's version."""
        return bool(self.row.libver) and self.libver == self.row.libver

    @property
    def failure(self) -> str:
        """Return why the row does not serve its shape any more; "" if it does."""
        after = self.change.after
        if not after.ok:
            return after.status
        serves = after.match is not None and after.match.row.line == self.row.line
        return "" if serves else f"refused; {after.solution} serves it ({after.why})"

    @property
    def against_torch(self) -> Estimate | None:
        """Return the row's time over torch's; None if torch's call is the row's, or failed."""
        ratio = 0.0 if self.failure else self.change.ratio
        return Estimate.around(ratio - 1.0, self.change.noise) if ratio else None

    @property
    def factor(self) -> float:
        """Return today's time over the table's; 0 if it does not run."""
        return 0.0 if self.failure else self.change.after.us / self.row.us


@attrs.frozen
class Remeasured:
    """The rows of a table, timed again.

    Attributes:
        device: the device that timed them.
        rows: the rows, the heaviest first.
        of: number of rows of this device that could be timed.
        share: share of the time that the timed rows carry.
        threshold: the slow-down that counts.
        notes: rows that were left out.
    """

    device: Device
    rows: tuple[Retimed, ...]
    of: int
    share: float
    threshold: float
    notes: tuple[str, ...] = ()

    @property
    def controls(self) -> Sequence[float]:
        """Return today's time over the table's of each row of an unchanged library."""
        return [row.factor for row in self.rows if row.factor and row.unchanged]

    @functools.cached_property
    def drift(self) -> tuple[float, float]:
        """Return this machine's time over the table's, by rows of unchanged libraries, and its noise.

        With too few of them it is unknown: clocks of two days may differ by the noise.
        """
        if len(self.controls) < CONTROLS:
            return 1.0, SEQUENTIAL
        median = statistics.median(self.controls)
        spread = statistics.median(abs(factor / median - 1.0) for factor in self.controls)
        return median, max(MEDIAN_OF_SPREAD * spread / math.sqrt(len(self.controls)), TIE)

    def against_table(self, row: Retimed) -> Estimate | None:
        """Return a row's time over the table's, without the machine's drift; None if it does not run."""
        drift, noise = self.drift
        if not row.factor:
            return None
        return Estimate.around(row.factor / drift - 1.0, math.hypot(row.change.after.noise, noise, DEFAULT_TIE))

    @property
    def failed(self) -> Sequence[Retimed]:
        """Return the rows that do not serve their shapes any more."""
        return [row for row in self.rows if row.failure]

    @property
    def behind(self) -> Sequence[Retimed]:
        """Return the rows that are slower than torch's call by the threshold."""
        return [row for row in self.rows if (found := row.against_torch) and found.exceeds(self.threshold)]

    @property
    def slower(self) -> Sequence[Retimed]:
        """Return the rows that are slower than the table says by the threshold."""
        return [row for row in self.rows if (found := self.against_table(row)) and found.exceeds(self.threshold)]

    @property
    def moved(self) -> Sequence[Retimed]:
        """Return the rows whose library has another version now, and which run."""
        return [row for row in self.rows if row.moved and row.factor]

    @functools.cached_property
    def cost(self) -> Estimate | None:
        """Return what the upgrade adds to the time of the moved rows; None without any."""
        before = sum(row.calls * row.row.us for row in self.moved)
        if not before:
            return None
        drift, noise = self.drift
        weights = [row.calls * row.change.after.us for row in self.moved]
        own = math.hypot(*(weight * row.change.after.noise for weight, row in zip(weights, self.moved, strict=True))) / sum(weights)
        return Estimate.around(sum(weights) / before / drift - 1.0, math.hypot(own, noise))

    @property
    def costs(self) -> bool:
        """Tell whether the upgrade costs more than the threshold."""
        return self.cost is not None and self.cost.exceeds(self.threshold)

    @property
    def fails(self) -> bool:
        """Tell whether a row fails or is slower, or the upgrade costs, by the threshold."""
        return bool(self.stale)

    @property
    def stale(self) -> Sequence[Retimed]:
        """Return the rows to tune again: those that fail or are slower, and moved ones that cost."""
        found = [*self.failed, *self.behind, *self.slower, *(self.moved if self.costs else ())]
        return [row for row in self.rows if row in found]


def remeasure(
    op: Op,
    file: Path,
    rows: Sequence[Row],
    *,
    top: int,
    threshold: float,
    progress: Callable[[Retimed], None] | None = None,
) -> Remeasured:
    """Time the rows that carry most time on the present device, each in rounds with torch's call.

    Args:
        op: the op of the table.
        file: the table.
        rows: its rows.
        top: most rows to time.
        threshold: the slow-down that counts.
        progress: called with each row.

    Raises:
        TableError: no row is for this device.
    """
    device, registry = current_device(), Registry()
    calls, notes = _weighed(op, rows, device)
    if not calls:
        why = "".join(f"; left out: {note}" for note in notes)
        raise TableError(f"{file}: has no row to time on {device}{why}; `tunedgemm tune --op {op.name} -i {file}` tunes its shapes here")
    times = {row: count * row.us for row, count in calls.items()}
    heaviest = sorted(calls, key=lambda row: -times[row])[:top]
    where = "cpu" if device.kind == "cpu" else str(max(device.index, 0))
    options = Options(device=where, iters=COMPARISON_ROUNDS, seconds=_SECONDS, kernel_timeout=_HUNG, timeout=_BINDING)
    found = []
    with measuring(op.name, [Side("torch", builtin=True), Side("table", only=(file,))], options) as ask:
        for row in heaviest:
            found.append(_retimed(ask, row, calls[row], registry.library_version(row.solution.libtype, device)))
            if progress is not None:
                progress(found[-1])
    share = sum(times[row] for row in heaviest) / sum(times.values())
    return Remeasured(device, tuple(found), len(calls), share, threshold, notes)


def _retimed(ask: Measuring, row: Row, calls: int, libver: str) -> Retimed:
    return Retimed(row, calls, ask.change(row.shape, calls), libver)


def _weighed(op: Op, rows: Sequence[Row], device: Device) -> tuple[dict[Row, int], tuple[str, ...]]:
    """Return the rows that serve calls on a device with the captured calls of each, and remarks."""
    table = Table(op, [rows_for(device, [row for row in rows if not row.bit_class])])
    winners = {}
    for row in rows_for(device, list(rows)):
        match = next(table.candidates(row.shape, device), None)
        if match is not None and match.row == row and row.shape.m:
            winners[row] = 1
    counts = Counter[Row]()
    for shape, calls in captured_calls(op).items():
        if match := next(table.candidates(shape, device), None):
            counts[match.row] += calls
    left = len(rows_for(device, list(rows))) - len(winners)
    notes = (f"{left} rows of a pin, behind one, of a bit class, or slower than another of the shape",) if left else ()
    return {row: counts[row] or 1 for row in winners}, notes


def captured_calls(op: Op) -> dict[Shape, int]:
    """Return the calls of each captured shape of an op; {} without any."""
    counts = Counter[Shape]()
    path = untuned_path(op)
    for untuned in read_shapes(path, op)[0] if present(path) else ():
        counts[key_shape(untuned.shape)] += untuned.calls
    return dict(counts)
