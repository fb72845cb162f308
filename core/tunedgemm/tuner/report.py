"""The user's view of tuning: its progress, and its summary."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tunedgemm.shape import Shape
from tunedgemm.timing import STATUSES, Timing
from tunedgemm.tuner.log import trials_path
from tunedgemm.tuner.trial import Event, Outcome, Place, Planned, Report, Step, Task

#: Columns of text in a file or a pipe, which have no width.
FILE_WIDTH = 160
#: The summary has a table of the shapes from this width on; narrower output has no table.
TABLE_WIDTH = 80
#: Without -v, more shapes than this omit the table.
MOST_ROWS = 50
#: Examples of one kind of fault in the summary, without -v.
EXAMPLES = 3
#: A row counts as slower than torch below this gain: noise alone makes 2 %.
SLOWER = 1 / 1.02
#: Statuses of a healthy run; the summary names solutions with other statuses.
HEALTHY = ("ok", "screened", "unsupported", "out_of_resources", "nondeterministic", "batch_variant")

_DOING = {"list": "listing", "compile": "compiling", "check": "checking", "screen": "screening", "time": "timing"}


def console() -> Console:
    """Return standard output; wide unless it is a terminal, so that lines of a log stay whole."""
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else FILE_WIDTH
    return Console(width=wide, highlight=False)


class Progress:
    """Shows a run: a context manager that `tune` calls with every event, from any thread.

    A terminal shows the shapes done, the time left, and each device's activity. Each finished shape
    leaves one line, and other output has only these lines. If the output closes, the run continues.

    Attributes:
        planned: the plan of the run, or None.
        outcomes: the finished shapes.
    """

    def __init__(self, *, verbose: bool = False, budget: float = 0.0, output: Console | None = None) -> None:
        """Create the display.

        Args:
            verbose: show every solution's status, too.
            budget: wall seconds of the run, 0 for no limit.
            output: the console; by default standard output.
        """
        self.planned: Planned | None = None
        self.outcomes: list[Outcome] = []
        self._verbose, self._budget = verbose, budget
        self._console = output or console()
        self._lock = threading.Lock()
        self._places: dict[tuple[str, int], Place] = {}
        self._busy: dict[tuple[str, int], Step] = {}
        self._since: dict[tuple[str, int], float] = {}
        self._spent: list[float] = []
        self._start = time.monotonic()
        self._live: Live | None = None
        self._unread = False

    def __enter__(self) -> Progress:
        self._start = time.monotonic()
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                get_renderable=self.display,
                console=self._console,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=sys.stderr.isatty(),
            )
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            with contextlib.suppress(OSError, ValueError):
                self._live.stop()
            self._live = None

    def __call__(self, place: Place | None, event: Event) -> None:
        """Record an event at *place*; None is the run as a whole."""
        now, text = time.monotonic(), None
        with self._lock:
            if isinstance(event, Planned):
                self.planned = event
                self._places |= {_key(place): place for place in event.places}
            key = None if place is None else _key(place)
            if place is not None and key is not None:
                self._places[key] = place
            if isinstance(event, Step) and key is not None:
                self._vacate(event.task, but=key)
                self._busy[key] = event
                self._since.setdefault(key, now)
            if isinstance(event, Outcome):
                began = self._since.get(key) if key is not None else None
                self._vacate(event.task)
                if not event.task.only:  # more solutions of a finished shape do not count
                    self.outcomes.append(event)
                    self._spent += [] if began is None else [now - began]
                    text = self._outcome_line(event, place)
        if text is not None:
            self._print(text)

    def _vacate(self, task: Task, but: tuple[str, int] | None = None) -> None:
        """Remove a shape from other devices: it is done, or another device took it over."""
        for key in [key for key, step in self._busy.items() if key != but and step.task.shape == task.shape]:
            del self._busy[key], self._since[key]

    def _print(self, text: Text) -> None:
        """Print outside this object's lock, which the display's thread takes after the console's."""
        if self._unread:
            return
        try:
            self._console.print(text, soft_wrap=True)
            self._console.file.flush()
        except (OSError, ValueError, SystemExit):  # rich turns a broken pipe into SystemExit
            self._unread = True

    def _outcome_line(self, outcome: Outcome, place: Place | None) -> Text:
        number = f"{len(self.outcomes)}/{len(self.planned.tasks)} " if self.planned else ""
        where = f", {_label(place, self._nodes())}" if place is not None and len(self._places) > 1 else ""
        text = Text(f"{number}{_line(outcome)}{where}", style="red" if outcome.winner is None else "")
        if self._verbose:
            text.append("".join(f"\n  {line}" for line in _details(outcome)), style="dim")
        return text

    def _nodes(self) -> bool:
        """Return whether the places are on several nodes, so that a node's name is useful."""
        return len({place.node for place in self._places.values()}) > 1

    def left(self, now: float) -> float | None:
        """Return the estimated seconds to the end of the run, None while unknown.

        The estimate uses the times of finished shapes and the running ones.
        """
        if self.planned is None or not self._spent:
            return None
        mean = sum(self._spent) / len(self._spent)
        waiting = max(len(self.planned.tasks) - len(self.outcomes) - len(self._busy), 0)
        gone = [now - self._since[key] for key in self._busy]
        running = sum(max(mean - seconds, seconds / 4) for seconds in gone)  # one beyond the mean still needs some time
        guess = (waiting * mean + running) / (len(self._busy) or len(self._places) or 1)
        return max(min(guess, self._budget - (now - self._start)), 0.0) if self._budget else guess

    def display(self) -> RenderableType:
        """Return the display below the lines of the finished shapes."""
        with self._lock:
            now, width, height = time.monotonic(), self._console.width, self._console.height
            if self.planned is None and not self._places:
                return Text(f"starting · {_clock(now - self._start)} elapsed")
            done, total = len(self.outcomes), len(self.planned.tasks) if self.planned else 0
            left = self.left(now)
            kind = "CPUs" if all(place.device.kind == "cpu" for place in self._places.values()) else "GPUs"
            words = [f"{done} of {total} shapes" if total else f"{done} shapes", f"{len(self._busy)} of {len(self._places)} {kind} busy"]
            if ratio := _weighted(self.outcomes):
                words.append(f"{ratio:.2f}x torch so far")
            words.append(f"{_clock(now - self._start)} elapsed" + ("" if left is None else f", about {_clock(left)} left"))
            rows = self._rows(width, max(height - 5, 1))
        bar = Table.grid()
        bar.add_row(ProgressBar(total=max(total, 1), completed=done, width=min(width, 72)))
        return Group(bar, Text(" · ".join(words)), rows)

    def _rows(self, width: int, most: int) -> Table:
        """Return each device's activity; a narrow terminal omits columns."""
        shown = (0, 1, 2, 3) if width >= 80 else (0, 1, 3) if width >= 50 else (0, 1)
        table = Table.grid(padding=(0, 2), expand=True)
        for column in shown:
            ratio = (None, 4, 5, None)[column]
            table.add_column(no_wrap=True, overflow="ellipsis", ratio=ratio, justify="right" if column == 3 else "left")
        nodes = self._nodes()
        keys = sorted(self._places, key=lambda key: (key not in self._busy, key))  # the busy ones first
        rows = [(_label(self._places[key], nodes), self._busy.get(key)) for key in keys]
        for label, step in rows[:most]:
            cells = (label, *_cells(step))
            table.add_row(*(Text(cells[column], style="dim" if step is None else "") for column in shown))
        if len(rows) > most:
            table.add_row(Text("..."), Text(f"and {len(rows) - most} more"))
        return table


def summary(report: Report, verbose: bool = False, output: Console | None = None, *, stale: bool = False) -> None:
    """Print the result of a run: shapes, failures with reasons, ties, gains, seconds and paths.

    Args:
        report: the result.
        verbose: list everything.
        output: the console; by default standard output.
        stale: the run had ``--stale``, which skips other shapes for other reasons.
    """
    output = output or console()
    if report.outcomes and output.width >= TABLE_WIDTH and (verbose or len(report.outcomes) <= MOST_ROWS):
        output.print(_table(report, output.width))
    for line in (*_verdict(report, verbose), *_ending(report, stale)):
        output.print(Text(line), soft_wrap=True)


def _table(report: Report, width: int) -> Table:
    devices = Counter(str(place.device) for place in report.places)
    named = ", ".join(f"{count} x {device}" if count > 1 else device for device, count in devices.items())
    op = report.outcomes[0].task.shape.op
    table = Table(title=Text(f"{op}: {number_of(len(report.outcomes), 'shape')} on {named}"), title_justify="left")
    headings = ["shape", "winner", "us", "± %", "torch us", "gain", "tied"]
    shown = headings if width >= 100 else ["shape", "winner", "us", "gain"]
    for heading in shown:
        table.add_column(heading, justify="left" if heading in ("shape", "winner") else "right", overflow="fold")
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
        table.add_row(*(Text(cells.get(heading, "")) for heading in shown))
    return table


def _verdict(report: Report, verbose: bool) -> Iterator[str]:
    outcomes, some = report.outcomes, None if verbose else EXAMPLES
    gains = [outcome.gain for outcome in outcomes if outcome.gain]
    if gains:
        mean = math.exp(sum(map(math.log, gains)) / len(gains))
        yield f"geometric mean {mean:.3f}x torch; weighted by count and time {_weighted(outcomes):.3f}x"
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
        examples = [f"{t.solution} on {t.shape}: {_short(t.detail)}" for t in timings if t.status == status and status not in HEALTHY]
        yield from _listed(f"{status} ({STATUSES[status]})", examples, some)
    for outcome in report.failed:
        yield f"failed: {outcome.task.shape}: {why_failed(outcome)}"
        bad = [timing for timing in outcome.timings if timing.status != "ok"]
        reasons = sorted({f"  {timing.solution.libtype}: {timing.status}: {_short(timing.detail)}" for timing in bad})
        yield from reasons[: None if verbose else 10]
    if seconds := _seconds(outcomes):
        yield f"seconds: {seconds}"
    yield from (f"pinned for every M: {sizes(pin.shape).removeprefix('M=0 ')}: {pin.solution}" for pin in report.pins)
    if verbose:
        yield from (f"skipped: {shape} (in the table already, or empty)" for shape in report.skipped)
        yield from (f"not started: {shape}" for shape in (*report.unbegun, *report.lost))


def _ending(report: Report, stale: bool) -> Iterator[str]:
    """Yield the last lines: the counts, and the paths."""
    failed = len(report.failed)
    counts = f"{len(report.outcomes) - failed} tuned, {failed} failed"
    why = "--stale: no rows of this device, or of the library's present version" if stale else "tuned already; --all tunes them again"
    counts += f", {len(report.skipped)} skipped ({why})" if report.skipped else ""
    counts += f", {len(report.unbegun)}not started (the budget is spent; the same command resumes them)" if report.unbegun else ""
    counts += f", {len(report.lost)} left without a working device (the same command resumes them)" if report.lost else ""
    if not (report.outcomes or report.skipped or report.unbegun or report.lost):
        counts += " (the input, or this shard of it, has no shapes)"
    yield f"{counts}: {report.output}"
    log = trials_path(report.output)
    if log.exists():
        yield f"every trial: {log}"


def _listed(heading: str, lines: Sequence[str], most: int | None) -> Iterator[str]:
    """Yield a heading and at most so many lines; nothing without lines."""
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
    reasons = [_short(outcome.reason), _counts(timing for timing in outcome.timings if timing.status != "ok")]
    if right := sorted({timing.solution.libtype for timing in outcome.timings if timing.status == "ok"}):
        reasons.append(f"{', '.join(right)} is right, but not in --libtype")
    return "; ".join(filter(None, reasons)) or "no backend offered a solution"


def _weighted(outcomes: Iterable[Outcome]) -> float:
    """Return the time of all calls with torch over that with the winners; 0 without any."""
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


def _line(outcome: Outcome) -> str:
    """Return the outcome of a shape as one line."""
    winner = outcome.winner
    if winner is None:
        return f"{outcome.task.shape}: no solution passed ({why_failed(outcome)})"
    gain = f", {outcome.gain:.2f}x torch" if outcome.gain else ""
    return f"{outcome.task.shape}: {winner.solution} {winner.us:.2f} us{gain}" + (f", {outcome.tied} tied" if outcome.tied else "")


def _details(outcome: Outcome) -> Iterator[str]:
    """Yield each solution's time and status, best first, and the seconds by activity."""
    for timing in sorted(outcome.timings, key=lambda timing: (timing.status != "ok", timing.us)):
        us = f"{timing.us:9.2f} us" if timing.us else " " * 12
        yield f"{us}  {timing.status:16} {timing.solution}  {_short(timing.detail)}".rstrip()
    if outcome.seconds:
        yield f"seconds: {_seconds([outcome])}"


def _short(detail: str) -> str:
    """Return a reason on one line."""
    return " ".join(detail.split())[:200]


def _cells(step: Step | None) -> tuple[str, str, str]:
    """Return shape, activity and best time so far of a device."""
    if step is None:
        return "", "idle", ""
    best = ""
    if step.best is not None:
        gain = f"  {step.baseline_us / step.best[1]:.2f}x" if step.baseline_us and step.best[1] else ""
        best = f"{step.best[1]:.2f} us{gain}"
    solution = f" {step.solution}" if step.solution else f", best {step.best[0]}" if step.best else ""
    return sizes(step.task.shape), f"{_DOING.get(step.activity, step.activity)}{solution}", best


def sizes(shape: Shape) -> str:
    """Return a shape without its op, with one dtype if both are equal."""
    return str(shape).removeprefix(f"{shape.op} ").replace(f"{shape.dtype}->{shape.dtype}", shape.dtype)


def number_of(count: int, thing: str) -> str:
    """Return a count of things as text."""
    return f"{count:,} {thing}" + ("" if count == 1 else "s")


def _key(place: Place) -> tuple[str, int]:
    """Return the identity of a place: devices with different indices are equal as values."""
    return place.node, place.device.index


def _label(place: Place, nodes: bool) -> str:
    name = "CPU" if place.device.kind == "cpu" else f"GPU {max(place.device.index, 0)}"
    return f"{place.node[:12]} {name}" if nodes else name


def _clock(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}" if whole >= 3600 else f"{whole // 60}:{whole % 60:02}"
