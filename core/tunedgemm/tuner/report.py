"""Summary of a tuning run, and texts about outcomes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rich.text import Text

from tunedgemm.ops.scale_order import of_any_m
from tunedgemm.shape import Shape
from tunedgemm.text.console import Column, Console, Grid, console, grid_of, print_grid
from tunedgemm.timing import STATUSES, Timing
from tunedgemm.tuner.log import trials_path
from tunedgemm.tuner.trial import ChosenClass, ClassCost, Outcome, Report

#: Least width, in columns, for a table of shapes in the summary.
TABLE_WIDTH = 80
#: Most shapes for the table without -v.
MOST_ROWS = 50
#: Examples per kind of fault in the summary, without -v.
EXAMPLES = 3
#: Speed-up below which a row counts as slower than torch; noise is 2 %.
SLOWER = 1 / 1.02
#: Expected statuses; the summary lists solutions with others.
HEALTHY = ("ok", "screened", "unsupported", "out_of_resources", "nondeterministic", "batch_variant")


def summary(report: Report, verbose: bool = False, output: Console | None = None, *, stale: bool = False) -> None:
    """Print the result of a run: shapes, failures with reasons, ties, gains, seconds and paths.

    Args:
        report: the result.
        verbose: list everything.
        output: the console; by default standard output.
        stale: whether the run had ``--stale``, which changes why shapes are skipped.
    """
    output = output or console()
    if report.outcomes and output.width >= TABLE_WIDTH and (verbose or len(report.outcomes) <= MOST_ROWS):
        print_grid(_grid(report), output)
    for line in (*_verdict(report, verbose), *_ending(report, stale)):
        output.print(Text(line), soft_wrap=True)


def _grid(report: Report) -> Grid:
    devices = Counter(str(place.device) for place in report.places)
    named = ", ".join(f"{count} x {device}" if count > 1 else device for device, count in devices.items())
    op = report.outcomes[0].task.shape.op
    optional = [Column(heading, right=True, optional=True) for heading in ("± %", "torch us", "tied")]
    us, gain = Column("us", right=True), Column("gain", right=True)
    columns: list[Column | str] = ["shape", "winner", us, *optional[:2], gain, optional[2]]
    rows = []
    for outcome in report.outcomes:
        winner, baseline = outcome.winner, outcome.baseline
        cells = {"shape": sizes(outcome.task.shape), "winner": "no solution passed"}
        if baseline is not None and baseline.us:
            cells["torch us"] = f"{baseline.us:.2f}"
        if winner is not None:
            cells |= {"winner": str(winner.solution), "us": f"{winner.us:.2f}", "± %": f"{winner.noise * 100:.1f}"}
            cells["tied"] = str(outcome.tied)
        if outcome.gain:
            cells["gain"] = f"{outcome.gain:.2f}x"
        rows.append(cells)
    return grid_of(columns, rows, f"{op}: {number_of(len(report.outcomes), 'shape')} on {named}")


def _verdict(report: Report, verbose: bool) -> Iterator[str]:
    outcomes, some = report.outcomes, None if verbose else EXAMPLES
    gains = [outcome.gain for outcome in outcomes if outcome.gain]
    if gains:
        mean = math.exp(sum(map(math.log, gains)) / len(gains))
        yield f"geometric mean {mean:.3f}x torch; weighted by count and time {weighted_gain(outcomes):.3f}x"
    if tied := sum(1 for outcome in outcomes if outcome.tied):
        yield f"ties: {tied} of {len(outcomes) - len(report.failed)} winners tied with others within noise"
    slower = [f"{outcome.task.shape}, {outcome.gain:.2f}x" for outcome in outcomes if 0 < outcome.gain < SLOWER]
    yield from _listed("slower than torch (not in --libtype)", slower, some)
    if held := [outcome.winner.throttled for outcome in outcomes if outcome.winner is not None and outcome.winner.throttled]:
        yield f"clocks: throttled by the driver for {len(held)} winners ({', '.join(sorted(set(held)))})"
    timings = [timing for outcome in outcomes for timing in outcome.timings]
    if timings:
        yield f"solutions: {_counts(timings)}"
    for status in STATUSES:
        examples = [f"{t.solution} on {t.shape}: {one_line(t.detail)}" for t in timings if t.status == status and status not in HEALTHY]
        yield from _listed(f"{status} ({STATUSES[status]})", examples, some)
    refusing = [f"{libtype}: {one_line(reason)}" for libtype, reason in _refusing(outcomes)]
    yield from _listed("backends that refused every shape", refusing, None)
    for outcome in report.failed:
        yield f"failed: {outcome.task.shape}: {why_failed(outcome)}"
        bad = [timing for timing in outcome.timings if timing.status != "ok"]
        reasons = sorted({f"  {timing.solution.libtype}: {timing.status}: {one_line(timing.detail)}" for timing in bad})
        yield from reasons[: None if verbose else 10]
    if seconds := _seconds(outcomes):
        yield f"seconds: {seconds}"
    for chosen in report.classes:
        yield from _class_lines(chosen, verbose)
    if verbose:
        yield from (f"skipped: {shape} (in the table already, or empty)" for shape in report.skipped)
        yield from (f"not started: {shape}" for shape in (*report.unbegun, *report.lost))


def _class_lines(chosen: ChosenClass, verbose: bool) -> Iterator[str]:
    """Yield the bit class of an (N, K), and the others with what they would cost."""
    name = sizes(chosen.shape).removeprefix("M=0 ")
    if chosen.reason:
        yield f"no bit class: {name}: {one_line(chosen.reason)}"
    first = 0 if chosen.reason else 1
    for cost in chosen.classes[:first]:
        yield f"bit class: {name}: {_class_text(cost)}; for any M {chosen.rows[-1].solution}"
    others = chosen.classes[first:]
    if others and not verbose:
        yield f"  other classes: {len(others)}; -v lists them"
    yield from (f"  other class: {_class_text(cost)}" for cost in others if verbose)


def _class_text(cost: ClassCost) -> str:
    price = f"{100 * (cost.cost - 1):+.1f} % over unconstrained" if cost.cost else "none serves every M"
    return f"{cost.label}: {number_of(cost.kernels, 'kernel')} of {', '.join(cost.libtypes)}; {price}"


def _refusing(outcomes: Sequence[Outcome]) -> list[tuple[str, str]]:
    """Return the backends that offered no solution for any shape, with their last reasons."""
    refusals = [refusal for outcome in outcomes for refusal in outcome.refusals]
    counts = Counter(libtype for libtype, _ in refusals)
    return [(libtype, reason) for libtype, reason in dict(refusals).items() if counts[libtype] == len(outcomes)]


def _ending(report: Report, stale: bool) -> Iterator[str]:
    failed, classless = len(report.failed), _classless(report)
    counts = f"{len(report.outcomes) - failed - classless} tuned, {failed} failed"
    counts += f", {classless} without a bit class and so without a row" if classless else ""
    why = "--stale: no rows of this device, or of the library's present version" if stale else "tuned already; --all tunes them again"
    counts += f", {len(report.skipped)} skipped ({why})" if report.skipped else ""
    counts += f", {len(report.elsewhere)} of other devices left (their lines name them)" if report.elsewhere else ""
    counts += f", {number_of(len(report.left_out), 'line')} of the input left out (warnings name them)" if report.left_out else ""
    counts += f", {len(report.unbegun)} left (the budget is spent; the same command resumes them)" if report.unbegun else ""
    counts += f", {len(report.lost)} left without a working device (the same command resumes them)" if report.lost else ""
    if not (report.outcomes or report.skipped or report.unbegun or report.lost or report.elsewhere or report.left_out):
        counts += " (the input, or this shard of it, has no shapes)"
    yield f"{counts}: {report.output}"
    log = trials_path(report.output)
    if log.exists():
        yield f"every trial: {log}"


def _classless(report: Report) -> int:
    """Return how many tuned shapes got no row, as their N and K have no bit class."""
    without = {of_any_m(chosen.shape) for chosen in report.classes if chosen.reason}
    without -= {of_any_m(chosen.shape) for chosen in report.classes if chosen.rows}  # on another kind of device
    return sum(outcome.winner is not None and of_any_m(outcome.task.shape) in without for outcome in report.outcomes)


def _listed(heading: str, lines: Sequence[str], most: int | None) -> Iterator[str]:
    """Yield a heading and at most *most* lines; nothing if there are no lines."""
    if lines:
        yield f"{heading}: {len(lines)}"
        yield from (f"  {text}" for text in lines[:most])
        if most is not None and len(lines) > most:
            yield f"  ... {len(lines) - most} more; -v lists them"


def _counts(timings: Iterable[Timing]) -> str:
    """Return ``12 ok, 3 wrong``: statuses in the order of `STATUSES`."""
    counts = Counter(timing.status for timing in timings)
    return ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])


def why_failed(outcome: Outcome) -> str:
    """Return why a shape failed: the statuses of its solutions, or why it was not tried."""
    reasons = [one_line(outcome.reason), _counts(timing for timing in outcome.timings if timing.status != "ok")]
    if right := sorted({timing.solution.libtype for timing in outcome.timings if timing.status == "ok"}):
        reasons.append(f"{', '.join(right)} is right, but not in --libtype")
    return "; ".join(filter(None, reasons)) or "no backend offered a solution"


def weighted_gain(outcomes: Iterable[Outcome]) -> float:
    """Return the speed-up over torch weighted by calls; 0 without times."""
    before = after = 0.0
    for outcome in outcomes:
        if outcome.gain and outcome.baseline is not None:
            weight = max(outcome.task.count, 1) * outcome.baseline.us
            before, after = before + weight, after + weight / outcome.gain
    return before / after if after else 0.0


def _seconds(outcomes: Iterable[Outcome]) -> str:
    totals: Counter[str] = Counter()
    for outcome in outcomes:
        for activity, seconds in outcome.seconds:
            totals[activity] += seconds  # type: ignore[assignment]  # a Counter of floats
    return ", ".join(f"{activity} {seconds:.1f}" for activity, seconds in totals.items())


def outcome_text(outcome: Outcome) -> str:
    """Return the outcome of a shape as one line."""
    winner = outcome.winner
    if winner is None:
        return f"{outcome.task.shape}: no solution passed ({why_failed(outcome)})"
    gain = f", {outcome.gain:.2f}x torch" if outcome.gain else ""
    return f"{outcome.task.shape}: {winner.solution} {winner.us:.2f} us{gain}" + (f", {outcome.tied} tied" if outcome.tied else "")


def outcome_details(outcome: Outcome) -> Iterator[str]:
    """Yield each solution's time and status, best first, and the seconds by activity."""
    for timing in sorted(outcome.timings, key=lambda timing: (timing.status != "ok", timing.us)):
        us = f"{timing.us:9.2f} us" if timing.us else " " * 12
        yield f"{us}  {timing.status:16} {timing.solution}  {one_line(timing.detail)}".rstrip()
    if outcome.seconds:
        yield f"seconds: {_seconds([outcome])}"


def one_line(detail: str) -> str:
    """Return a reason on one line."""
    return " ".join(detail.split())[:200]


def sizes(shape: Shape) -> str:
    """Format a shape without its op, and with one dtype if both are equal."""
    return str(shape).removeprefix(f"{shape.op} ").replace(f"{shape.dtype}->{shape.dtype}", shape.dtype)


def number_of(count: int, thing: str) -> str:
    """Return a count of things as text."""
    return f"{count:,} {thing}" + ("" if count == 1 else "s")
