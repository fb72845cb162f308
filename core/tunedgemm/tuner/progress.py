"""Live display of a tuning run."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tunedgemm.text.console import Console, console
from tunedgemm.tuner.report import outcome_details, outcome_text, sizes, weighted_gain
from tunedgemm.tuner.trial import Event, Outcome, Place, Planned, Step, Task

_DOING = {"list": "listing", "compile": "compiling", "check": "checking", "screen": "screening", "time": "timing"}


class Progress:
    """Live display: a context manager that `tune` calls with each event, from any thread.

    A terminal shows the finished shapes, the remaining time, and each device's activity. Each
    finished shape prints one line; other output has only these. A closed output does not stop the
    run.

    Attributes:
        planned: the plan of the run; None before it is known.
        outcomes: the finished shapes.
    """

    def __init__(
        self,
        *,
        verbose: bool = False,
        budget: float = 0.0,
        output: Console | None = None,
        then: Callable[[Place | None, Event], None] | None = None,
    ) -> None:
        """Create the display.

        Args:
            verbose: also show the status of every solution.
            budget: wall time of the run in seconds; 0 for no limit.
            output: the console; by default standard output.
            then: called with each event after the display.
        """
        self.planned: Planned | None = None
        self.outcomes: list[Outcome] = []
        self._verbose, self._budget = verbose, budget
        self._console = output or console()
        self._then = then or (lambda *_: None)
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
        self._then(place, event)

    def _vacate(self, task: Task, but: tuple[str, int] | None = None) -> None:
        """Remove a shape from other devices, since it is finished or was taken over."""
        for key in [key for key, step in self._busy.items() if key != but and step.task.shape == task.shape]:
            del self._busy[key], self._since[key]

    def _print(self, text: Text) -> None:
        """Print without holding this object's lock, to keep the display thread's lock order."""
        if self._unread:
            return
        try:
            self._console.print(text, soft_wrap=True)
            self._console.file.flush()
        except (OSError, ValueError):
            self._unread = True

    def _outcome_line(self, outcome: Outcome, place: Place | None) -> Text:
        number = f"{len(self.outcomes)}/{len(self.planned.tasks)} " if self.planned else ""
        where = f", {_label(place, self._nodes())}" if place is not None and len(self._places) > 1 else ""
        text = Text(f"{number}{outcome_text(outcome)}{where}", style="red" if outcome.winner is None else "")
        if self._verbose:
            text.append("".join(f"\n  {line}" for line in outcome_details(outcome)), style="dim")
        return text

    def _nodes(self) -> bool:
        """Check whether the places are on several nodes, so that names of nodes matter."""
        return len({place.node for place in self._places.values()}) > 1

    def left(self, now: float) -> float | None:
        """Return the estimated remaining seconds of the run; None if unknown."""
        if self.planned is None or not self._spent:
            return None
        mean = sum(self._spent) / len(self._spent)
        waiting = max(len(self.planned.tasks) - len(self.outcomes) - len(self._busy), 0)
        gone = [now - self._since[key] for key in self._busy]
        running = sum(max(mean - seconds, seconds / 4) for seconds in gone)  # beyond the mean, some time is still left
        guess = (waiting * mean + running) / (len(self._busy) or len(self._places) or 1)
        return max(min(guess, self._budget - (now - self._start)), 0.0) if self._budget else guess

    def display(self) -> RenderableType:
        """Render the live part, below the lines of finished shapes."""
        with self._lock:
            now, width, height = time.monotonic(), self._console.width, self._console.height
            if self.planned is None and not self._places:
                return Text(self._words(now))
            done, total = len(self.outcomes), len(self.planned.tasks) if self.planned else 0
            words = self._words(now)
            rows = self._rows(width, max(height - 5, 1))
        bar = Table.grid()
        bar.add_row(ProgressBar(total=max(total, 1), completed=done, width=min(width, 72)))
        return Group(bar, Text(words), rows)

    def status(self) -> str:
        """Return the status line: shapes, devices, gain and times."""
        with self._lock:
            return self._words(time.monotonic())

    def _words(self, now: float) -> str:
        """Return the status line; the caller holds the lock."""
        if self.planned is None and not self._places:
            return f"starting · {_clock(now - self._start)} elapsed"
        done, total = len(self.outcomes), len(self.planned.tasks) if self.planned else 0
        left = self.left(now)
        kind = "CPUs" if all(place.device.kind == "cpu" for place in self._places.values()) else "GPUs"
        words = [f"{done} of {total} shapes" if total else f"{done} shapes", f"{len(self._busy)} of {len(self._places)} {kind} busy"]
        if ratio := weighted_gain(self.outcomes):
            words.append(f"{ratio:.2f}x torch so far")
        if expected := sum(task.saving for task in self.planned.tasks) if self.planned else 0.0:
            words.append(f"{100 * sum(outcome.task.saving for outcome in self.outcomes) / expected:.0f} % of the expected saving")
        words.append(f"{_clock(now - self._start)} elapsed" + ("" if left is None else f", about {_clock(left)} left"))
        return " · ".join(words)

    def _rows(self, width: int, most: int) -> Table:
        """Render each device's activity, with fewer columns on a narrow terminal."""
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


def _cells(step: Step | None) -> tuple[str, str, str]:
    if step is None:
        return "", "idle", ""
    best = ""
    if step.best is not None:
        gain = f"  {step.baseline_us / step.best[1]:.2f}x" if step.baseline_us and step.best[1] else ""
        best = f"{step.best[1]:.2f} us{gain}"
    solution = f" {step.solution}" if step.solution else f", best {step.best[0]}" if step.best else ""
    return sizes(step.task.shape), f"{_DOING.get(step.activity, step.activity)}{solution}", best


def _key(place: Place) -> tuple[str, int]:
    """Return a key that distinguishes device indices, which equality of devices ignores."""
    return place.node, place.device.index


def _label(place: Place, nodes: bool) -> str:
    name = "CPU" if place.device.kind == "cpu" else f"GPU {max(place.device.index, 0)}"
    return f"{place.node[:12]} {name}" if nodes else name


def _clock(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}" if whole >= 3600 else f"{whole // 60}:{whole % 60:02}"
