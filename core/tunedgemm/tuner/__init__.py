"""The tuner: `tune` is a run, in the order of its stages; `lane` has the stages of one shape."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import attrs

from tunedgemm import __version__
from tunedgemm.backends.registry import Backend, Registry, order
from tunedgemm.device import Device
from tunedgemm.errors import LibtypeError
from tunedgemm.ops import op_named
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.folders import tuned_path
from tunedgemm.timing import Timing
from tunedgemm.tuner.executors import Crew, Lanelike, work
from tunedgemm.tuner.plan import Source, groups, plan, requested
from tunedgemm.tuner.processes import Terminated, stopped_by_sigterm
from tunedgemm.tuner.select import select_pin
from tunedgemm.tuner.store import MISSING, Store
from tunedgemm.tuner.trial import MEASURE, Bench, Event, Options, Outcome, Place, Planned, Report, Task, Trials

#: Options that decide what a trial says; trials of an interrupted run with others are not reused.
_MATTERS = (
    "libtype", "errRatio", "atol", "rtol", "deterministic", "batch_invariant", "cache", "timing", "warmup", "iters", "candidates", "topk",
    "seconds", "shard", "all", "timeout", "kernel_timeout",
)  # fmt: skip
#: So many solutions of each shape, and of the whole group, may become its pin.
_PIN_BEST = 4

Progress = Callable[[Place | None, Event], None]


def tune(
    op: str = "a16w16",
    shapes: Source = None,
    output: Path | None = None,
    options: Options | None = None,
    *,
    registry: Registry | None = None,
    bench: Bench | None = None,
    progress: Progress | None = None,
) -> Report:
    """Time every solution of every chosen backend on each shape, and store the winners.

    Kernels run in one process for each device, which is replaced where one of them hangs, faults or
    ends it.

    Args:
        op: name of the op.
        shapes: shapes, a mapping of them to how often the workload runs each, or an untuned CSV;
            without it the file that capture wrote.
        output: the tuned CSV; without it the op's table in the user folder (or the first path of
            its variable).
        options: how; see `Options`.
        registry: other backends than the installed ones; kernels run in this process then.
        bench: another source of times than measuring: importable by a child process, unless
            *registry* is given.
        progress: called with each event and where it came from.

    Raises:
        UserError: the input, the output, a libtype or a device cannot be used, or what is measured
            cannot be kept.
        KeyboardInterrupt: also for SIGTERM (`Terminated`); the lanes have ended, and what was
            measured is kept.
    """
    options, family = options or Options(), op_named(op)
    output = output or tuned_path(family)
    backends = _usable(registry or Registry(), family, options)
    listed = requested(family, shapes, output if options.stale else None)
    store = Store(family, output, options.profile, options.sort)
    # With --stale the table tells what is done.
    store.open(_identity(options, backends), options.resume and not options.stale)
    executor = importlib.import_module(f"{__name__}.executors.{options.executor}")
    places = order(backends, options.libtype)
    with contextlib.closing(store), stopped_by_sigterm(), executor.lanes(family, options, places, registry, bench) as lanes:
        report = _Run(family, options, store, lanes, progress or (lambda *_: None)).report(listed, output)
        if not (report.unbegun or report.lost):
            store.finish()
    return report


@attrs.define(eq=False)
class _Run:
    """Shapes through lanes into the store."""

    op: Op
    options: Options
    store: Store
    lanes: Sequence[Lanelike]
    progress: Progress
    _outcomes: list[Outcome] = attrs.field(factory=list, init=False)
    _started: float = attrs.field(factory=time.monotonic, init=False)

    def report(self, listed: Sequence[tuple[Shape, int]], output: Path) -> Report:
        """Plan for each kind of device, let its lanes work, keep what they tell."""
        skipped: list[Shape] = []
        work_of: list[tuple[list[Lanelike], list[Task]]] = []
        for device, lanes in self._kinds().items():
            self.store.use(device, lanes[0].versions)
            planned = plan(self.op, listed, output, device, self.options, lanes[0].versions)
            skipped += planned.skipped
            work_of.append((lanes, list(planned.tasks)))
        places = tuple(lane.place for lane in self.lanes)
        self.progress(None, Planned(tuple(task for _, tasks in work_of for task in tasks), tuple(skipped), places, output))
        crews = []
        for lanes, tasks in work_of:
            crews.append(self._crew(lanes, [task for task in tasks if not self._done_before(task, lanes[0].place)]))
        self._work(crews)
        waiting = [task for crew in crews for task in crew.left()]
        pins = self._pinned(waiting) if self.options.batch_invariant else []
        spent = bool(self.options.budget) and time.monotonic() >= self._started + self.options.budget
        left = tuple(task.shape for task in waiting)
        unbegun, lost = (left, ()) if spent else ((), left)
        return Report(places, output, tuple(self._outcomes), tuple(skipped), unbegun, lost, tuple(pins))

    def _kinds(self) -> dict[Device, list[Lanelike]]:
        """The lanes by kind of device: what one measures holds for the others of its kind alone."""
        kinds: dict[Device, list[Lanelike]] = {}
        for lane in self.lanes:
            kinds.setdefault(lane.place.device, []).append(lane)
        return kinds

    def _crew(self, lanes: Sequence[Lanelike], tasks: Iterable[Task]) -> Crew:
        tasks = tuple(tasks)
        deadline = self._started + self.options.budget if self.options.budget else float("inf")
        known = {} if any(task.only for task in tasks) else {t.shape: self.store.known(lanes[0].place.device, t.shape) for t in tasks}
        return Crew(lanes, deque(tasks), known, self.options.batch, deadline)

    def _done_before(self, task: Task, place: Place) -> bool:
        """Whether the run that this one resumes was through with a shape; its outcome counts for this one."""
        winner = self.store.done(place.device, task.shape)
        if winner is MISSING:
            return False
        timings = self.store.known(place.device, task.shape)
        reason = "" if winner else "it failed before the run was interrupted; --no-resume tries again"
        self._keep(place, Outcome(task, winner, None, timings, place=place, reason=reason), told=False)
        return True

    def _work(self, crews: Sequence[Crew]) -> None:
        with contextlib.closing(work(crews)) as events:
            for place, event in events:
                if isinstance(event, Trials):
                    self.store.log(place, event.timings)
                elif isinstance(event, Outcome):
                    self._keep(place, event)
                self.progress(place, event)

    def _keep(self, place: Place, outcome: Outcome, *, told: bool = True) -> None:
        self._outcomes.append(outcome)
        if not told:
            self.progress(place, outcome)
        elif self.options.batch_invariant:
            self.store.log(place, outcome.timings)
        else:
            self.store.record(outcome)

    def _pinned(self, waiting: list[Task]) -> list[Timing]:
        """One solution for all M of each (N, K): the best few of each M, timed at every M of the group.

        Args:
            waiting: tasks that nobody did; a group with one of them is left to the next run, for
                its pin would count as final. The tasks of a group that cannot be timed to the end
                are added.
        """
        pins = []
        for lanes in self._kinds().values():
            here = {o.task.shape: o for o in self._outcomes if o.place is not None and o.place.device == lanes[0].place.device}
            for tasks in groups([*(outcome.task for outcome in here.values()), *waiting]):
                group = [here[task.shape] for task in tasks if task.shape in here]
                if len(group) < len(tasks) or not all(outcome.winner for outcome in group):
                    continue
                pin, left = self._pin(group, lanes)
                if left:
                    waiting += [outcome.task for outcome in group]
                elif pin is not None:
                    place = lanes[0].place
                    libver = lanes[0].versions.get(pin.solution.libtype, "")
                    self.store.pin(place, pin.shape, pin, libver)
                    pins.append(attrs.evolve(pin, shape=attrs.evolve(pin.shape, m=0)))
        return pins

    def _pin(self, group: Sequence[Outcome], lanes: Sequence[Lanelike]) -> tuple[Timing | None, bool]:
        """The pin of a group, and whether something of it was left untimed: the budget was spent, or the devices were lost."""
        eligible = tuple(lanes[0].places)
        best = _promising(group, eligible)
        timings = {outcome.task.shape: {timing.solution: timing for timing in outcome.timings} for outcome in group}
        tasks = []
        for shape, found in timings.items():
            missing = tuple(solution for solution in best if solution not in found or found[solution].status == "screened")
            tasks += [Task(shape, only=missing)] if missing else []
        crew = self._crew(lanes, tasks)
        with contextlib.closing(work([crew])) as events:
            for place, event in events:
                self.progress(place, event)
                if isinstance(event, Outcome):
                    self.store.log(place, event.timings)
                    fresh = {timing.solution: timing for timing in event.timings if timing.solution in event.task.only}
                    timings[event.task.shape].update(fresh)
        counts = {outcome.task.shape: outcome.task.count for outcome in group}
        by_shape = {shape: tuple(found.values()) for shape, found in timings.items()}
        pin = select_pin(by_shape, counts, group[0].task.incumbent, lanes[0].places, eligible)
        return timings[group[0].task.shape][pin] if pin is not None else None, bool(crew.left())


def _promising(group: Sequence[Outcome], eligible: Sequence[str]) -> list[Solution]:
    """The fastest few at each M, and the few with the least time over all, as far as rough times tell."""
    found: dict[Solution, None] = {}
    total: dict[Solution, float] = {}
    for outcome in group:
        timed = [t for t in outcome.timings if t.us and t.status in ("ok", "screened") and t.solution.libtype in eligible]
        timed.sort(key=lambda timing: timing.us)
        found |= dict.fromkeys(timing.solution for timing in timed[:_PIN_BEST])
        slowest = timed[-1].us if timed else 0.0
        us = {timing.solution: timing.us for timing in timed}
        for solution in {*us, *total}:  # where one was not timed it may be no faster than the slowest
            earlier = total.get(solution, 0.0)
            total[solution] = earlier + outcome.task.count * us.get(solution, slowest)
    return list(found | dict.fromkeys(sorted(total, key=lambda solution: total[solution])[:_PIN_BEST]))


def _usable(registry: Registry, op: Op, options: Options) -> list[Backend]:
    backends = registry.select(options.libtype)
    if not any(op.name in backend.ops for backend in backends):
        covered = "; ".join(f"{backend.libtype} covers {', '.join(backend.ops)}" for backend in backends) or "none is installed"
        raise LibtypeError(f"no backend of --libtype {options.libtype} covers the op {op.name}: {covered}")
    return backends


def _identity(options: Options, backends: Sequence[Backend]) -> dict[str, str]:
    """What has to be the same for a trial to be as good as a new one."""
    versions = {f"{backend.libtype} of {backend.distribution}": backend.version for backend in backends}
    stated = [option for backend in backends for option in backend.options]
    return {
        "tunedgemm": __version__,
        "measure": MEASURE,
        "torch": importlib.metadata.version("torch"),
        **versions,
        **{option.variable: option.value() for option in stated if option.value() != option.default},
        **{name: str(getattr(options, name)) for name in _MATTERS},
    }


__all__ = ["Options", "Outcome", "Report", "Terminated", "stopped_by_sigterm", "tune"]
