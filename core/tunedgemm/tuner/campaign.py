"""Campaign: tune the shapes of several ops within a budget, the most valuable first.

A wave is a part of one op's shapes that fits the remaining time. Tables and trial logs record what
is done, so the next campaign resumes where this one stopped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.table.csvfile import key_shape
from tunedgemm.table.sheet import present
from tunedgemm.table.untuned import Untuned
from tunedgemm.tuner.log import read_log, trials_path
from tunedgemm.tuner.plan import plan
from tunedgemm.tuner.trial import Options, Task

#: Assumed seconds per shape before the first is timed, relative to `Options.seconds`.
_PACE = 2.5
#: Fraction of the remaining time that a wave fills. If time runs short, a wave's first shape is
#: tuned from fewer solutions and the others not at all.
_FILLED = 0.9
#: Fewest shapes of a wave, as a fraction of its op's, since starting a worker takes seconds.
_LEAST = 0.1


@attrs.frozen
class Part:
    """The shapes of one op.

    Attributes:
        op: the op.
        listed: its shapes with call counts.
        tables: its tables; the first is written.
    """

    op: Op
    listed: tuple[Untuned, ...]
    tables: tuple[Path, ...]


@attrs.frozen
class Wave:
    """The next shapes of one op to tune, with call counts.

    Attributes:
        part: the op's part of the campaign.
        shapes: the shapes, the most valuable first.
        budget: wall time for them, in seconds.
    """

    part: Part
    shapes: Mapping[Shape, int]
    budget: float


@attrs.define
class Campaign:
    """The shapes of several ops that are left, ordered by value: calls times the expected saving.

    Attributes:
        parts: the ops, each once.
        device: the device that tunes.
        options: options of the tuner, with a budget.
        registry: the backends that may serve untuned calls.
        refused: names of the ops that cannot be tuned.
    """

    parts: tuple[Part, ...]
    device: Device
    options: Options
    registry: Registry
    refused: set[str] = attrs.field(factory=set)
    _expected: float = attrs.field(default=0.0, init=False)

    @property
    def shapes(self) -> int:
        """Return the number of all shapes, done or not."""
        return sum(len({key_shape(listed.shape) for listed in part.listed}) for part in self.parts)

    def left(self) -> list[tuple[Part, Task]]:
        """Return the shapes without a row and without a failure, the most valuable first."""
        tasks: list[tuple[Part, Task]] = []
        for part in (part for part in self.parts if part.op.name not in self.refused):
            failed = self._failures(part)
            for task in plan(part.op, part.listed, part.tables, self.device, self.options, registry=self.registry).tasks:
                if key_shape(task.shape) not in failed:
                    tasks.append((part, task))
        return sorted(tasks, key=lambda entry: (-entry[1].saving, str(entry[1].shape)))

    def waves(self, end: float) -> Iterator[Wave]:
        """Yield waves until no shape is left, a wave changes nothing, or `time.monotonic` is *end*.

        The caller must tune each wave before taking the next.
        """
        begun, tasks = time.monotonic(), self.left()
        total, before, self._expected = len(tasks), 0, sum(task.saving for _, task in tasks)
        while len(tasks) not in (0, before) and (seconds := end - time.monotonic()) > 0:
            ended = total - len(tasks)
            pace = max((time.monotonic() - begun) / ended if ended else _PACE * self.options.seconds, 1e-3)
            if ended and seconds < pace / _FILLED:
                return
            groups: dict[Op, list[tuple[Part, Task]]] = {}
            for part, task in tasks[: max(1, int(_FILLED * seconds / pace))]:
                groups.setdefault(part.op, []).append((part, task))
            least = _LEAST * sum(map(len, groups.values()))
            several = [group for group in groups.values() if len(group) >= least]
            for index, group in enumerate(several):
                share = len(group) / sum(map(len, several[index:]))
                if (budget := (end - time.monotonic()) * share) > 0:
                    yield Wave(group[0][0], {task.shape: task.count for _, task in group}, budget)
            before, tasks = len(tasks), self.left()

    def summary(self) -> str:
        """Return what is left in words, with its share of the saving that `waves` expected at first."""
        tasks = self.left()
        text = f"{len(tasks)} of {self.shapes} shapes are left"
        share = sum(task.saving for _, task in tasks) / self._expected if self._expected else 1.0
        return text + (f", {100 * share:.0f} % of the expected saving; the same command goes on" if tasks else "")

    def _failures(self, part: Part) -> set[Shape]:
        """Return the shapes for which no solution passed, by their last outcome in the trial log."""
        log = trials_path(part.tables[0])
        won: dict[Shape, bool] = {}
        for entry in read_log(log, kinds=("shape",)) if self.options.resume and present(log) else ():
            if entry.fields["shape"].get("op") == part.op.name:
                device, shape = entry.where()
                won |= {key_shape(shape): entry.fields["winner"] is not None} if device == self.device else {}
        return {shape for shape, has_winner in won.items() if not has_winner}
