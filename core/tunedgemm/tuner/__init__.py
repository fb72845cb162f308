"""The tuner: `tune` runs over many shapes; `shape_run` takes one shape through the stages."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import attrs

from tunedgemm.backends.backend import Backend
from tunedgemm.backends.registry import Registry, tie_order
from tunedgemm.device import Device
from tunedgemm.errors import LibtypeError
from tunedgemm.ops import op_named
from tunedgemm.ops.op import Op
from tunedgemm.ops.scale_order import order_of_all, with_order
from tunedgemm.shape import Shape
from tunedgemm.table.folders import table_paths, tuned_path
from tunedgemm.tuner.class_search import ClassSearch
from tunedgemm.tuner.classes import Group
from tunedgemm.tuner.executors import AnyDeviceTuner, WorkerGroup, device_tuners, work
from tunedgemm.tuner.plan import Requested, Source, group_of, groups, plan, refuse_without_classes, requested
from tunedgemm.tuner.processes import Terminated, stopped_by_sigterm
from tunedgemm.tuner.store import MISSING, Store
from tunedgemm.tuner.trial import MEASURE, Bench, ChosenClass, Event, Options, Outcome, Place, Planned, Report, Task, Trials
from tunedgemm.version import __version__

#: Options that affect results; a run reuses only trials with equal values.
_IDENTITY_OPTIONS = (
    "libtype", "errRatio", "atol", "rtol", "deterministic", "batch_invariant", "cache", "timing", "warmup", "iters", "candidates", "topk",
    "search", "seconds", "shard", "all", "timeout", "kernel_timeout",
)  # fmt: skip

Progress = Callable[[Place | None, Event], None]

#: The device tuners of one kind of device, and their tasks.
_Tasks = tuple[Sequence[AnyDeviceTuner], Sequence[Task]]


def tune(
    op: str = "a16w16",
    shapes: Source = None,
    output: Path | Sequence[Path] | None = None,
    options: Options | None = None,
    *,
    registry: Registry | None = None,
    bench: Bench | None = None,
    progress: Progress | None = None,
) -> Report:
    """Time every solution of every chosen backend on each shape, and store the winners.

    Kernels run in one process per device, which is replaced if it hangs, faults or dies.

    Args:
        op: name of the op.
        shapes: shapes, a mapping of shapes to call counts, or an untuned CSV; by default the
            captured shapes.
        output: the tuned CSV; by default the first path of the op's variable, else its table in
            the user folder. Of several, the first is written, and rows of all count as tuned.
        options: how to tune; see `Options`.
        registry: replaces the installed backends; kernels then run in this process.
        bench: replaces the measurement of times; importable in a child process unless *registry*
            is given.
        progress: called with each event and its place.

    Raises:
        UserError: the input, the output, a libtype or a device is unusable, or a result cannot be
            stored.
        KeyboardInterrupt: on Ctrl-C or SIGTERM (`Terminated`), after the devices have stopped;
            results are kept.
    """
    options, family = options or Options(), op_named(op)
    tables = table_paths(output) or (tuned_path(family, invariant=options.batch_invariant),)
    if options.batch_invariant:
        refuse_without_classes(tables[0], family)
    backends = _usable(installed := registry or Registry(), family, options)
    listed = requested(family, shapes, tables[0] if options.stale else None)
    store = Store(family, tables[0], options.profile, options.sort)
    # With --stale, only the table decides which shapes are done.
    store.open(_identity(options, backends), options.resume and not options.stale)
    ranks = tie_order(backends, options.libtype)
    with contextlib.closing(store), stopped_by_sigterm(), device_tuners(family, options, ranks, registry, bench) as tuners:
        report = _Run(family, options, store, tuners, installed, progress or (lambda *_: None)).report(listed, tables)
        if not (report.unbegun or report.lost):
            store.finish()
    return report


@attrs.define(eq=False)
class _Run:
    """One run: shapes go through device tuners into the store."""

    op: Op
    options: Options
    store: Store
    tuners: Sequence[AnyDeviceTuner]
    registry: Registry
    progress: Progress
    _outcomes: list[Outcome] = attrs.field(factory=list, init=False)
    _started: float = attrs.field(factory=time.monotonic, init=False)

    def report(self, listed: Requested, tables: Sequence[Path]) -> Report:
        """Plan per kind of device, tune on its devices, store the results."""
        skipped: list[Shape] = []
        elsewhere: list[Shape] = []
        planned: list[_Tasks] = []
        for device, tuners in self._kinds().items():
            self.store.use(device, tuners[0].versions)
            kind_plan = plan(self.op, listed.on(self.op, device), tables, device, self.options, tuners[0].versions, self.registry)
            skipped += kind_plan.skipped
            elsewhere += kind_plan.elsewhere
            planned.append((tuners, kind_plan.tasks))
        places = tuple(tuner.place for tuner in self.tuners)
        self.progress(None, Planned(tuple(task for _, tasks in planned for task in tasks), tuple(skipped), places, tables[0]))
        waiting: list[Task] = []
        classes: list[ChosenClass] = []
        spent = False
        for part in self._parts(planned):
            begun = len(self._outcomes)
            workers = [
                self._group(tuners, [task for task in tasks if not self._report_resumed(task, tuners[0].place)]) for tuners, tasks in part
            ]
            self._work(workers)
            left = [task for group in workers for task in group.left()]
            classes += self._find_classes(self._outcomes[begun:], left) if self.options.batch_invariant else []
            waiting += left
            spent = spent or any(group.spent for group in workers)
        spent = spent or (bool(self.options.budget) and time.monotonic() >= self._started + self.options.budget)
        left_shapes = tuple(task.shape for task in waiting)
        unbegun, lost = (left_shapes, ()) if spent else ((), left_shapes)
        return Report(
            places, tables[0], tuple(self._outcomes), tuple(skipped), unbegun, lost, tuple(classes), tuple(elsewhere), listed.left_out
        )

    def _parts(self, planned: Sequence[_Tasks]) -> Sequence[Sequence[_Tasks]]:
        """Return the tasks of each kind of device, in the parts that are finished in turn.

        With a budget, a part is one group for each kind, so that finished groups have their class
        when the budget is spent.
        """
        if not (self.options.batch_invariant and self.options.budget):
            return [planned]
        by_kind = ([(tuners, group) for group in groups(tasks)] for tuners, tasks in planned)
        return [tuple(filter(None, part)) for part in itertools.zip_longest(*by_kind)]

    def _kinds(self) -> dict[Device, list[AnyDeviceTuner]]:
        """Group the device tuners by kind of device, for which results hold."""
        kinds: dict[Device, list[AnyDeviceTuner]] = {}
        for tuner in self.tuners:
            kinds.setdefault(tuner.place.device, []).append(tuner)
        return kinds

    def _group(self, tuners: Sequence[AnyDeviceTuner], tasks: Iterable[Task]) -> WorkerGroup:
        tasks = tuple(tasks)
        deadline = self._started + self.options.budget if self.options.budget else float("inf")
        device = tuners[0].place.device
        earlier = {task.shape: self.store.final_timings(device, task.shape) for task in tasks if task.sizes or not task.only}
        return WorkerGroup(tuners, deque(tasks), earlier, self.options.batch, deadline)

    def _report_resumed(self, task: Task, place: Place) -> bool:
        """Report the outcome of a shape finished before the resume; return False if unfinished."""
        winner = self.store.done(place.device, task.shape)
        if winner is MISSING:
            return False
        timings = self.store.final_timings(place.device, task.shape)
        reason = "" if winner else "it failed before the run was interrupted; --no-resume tries again"
        outcome = Outcome(task, winner, None, timings, place=place, reason=reason)
        self._outcomes.append(outcome)
        self.progress(place, outcome)
        return True

    def _work(self, groups: Sequence[WorkerGroup]) -> None:
        with contextlib.closing(work(groups)) as events:
            for place, event in events:
                if isinstance(event, Trials):
                    self.store.log(place, event.timings)
                elif isinstance(event, Outcome):
                    self._outcomes.append(event)
                    if self.options.batch_invariant:
                        self.store.log(place, event.timings)
                    else:
                        self.store.record(event)
                self.progress(place, event)

    def _find_classes(self, finished: Sequence[Outcome], waiting: list[Task]) -> list[ChosenClass]:
        """Choose and store the bit class of each (N, K).

        Args:
            finished: the outcomes of its shapes.
            waiting: unfinished tasks. Groups with one are skipped, because a class counts as final;
                all tasks of unfinished groups are added.
        """
        classes: list[ChosenClass] = []
        for tuners in self._kinds().values():
            place, versions = tuners[0].place, tuners[0].versions
            by_shape = {o.task.shape: o for o in finished if o.place is not None and o.place.device == place.device}
            found = []
            for tasks in groups([*(outcome.task for outcome in by_shape.values()), *waiting]):
                outcomes = [by_shape[task.shape] for task in tasks if task.shape in by_shape]
                if len(outcomes) == len(tasks) and all(outcome.winner for outcome in outcomes):
                    shape = with_order(group_of(tasks[0].shape), order_of_all(task.shape for task in tasks))
                    found.append(Group(shape, outcomes, tuners[0].ranks, place.device.kind))
            chosen, partial = ClassSearch(found, functools.partial(self._more, tuners)).run()
            waiting += [outcome.task for group in partial for outcome in group.outcomes]
            for each in (one for one in chosen if one.rows):
                self.store.put_class(place, each, versions)
            classes += chosen
        return classes

    def _more(self, tuners: Sequence[AnyDeviceTuner], tasks: Sequence[Task]) -> tuple[list[Outcome], frozenset[Shape]]:
        """Run further tasks of finished shapes; return their outcomes, and the shapes left."""
        workers, outcomes = self._group(tuners, tasks), []
        with contextlib.closing(work([workers])) as events:
            for place, event in events:
                self.progress(place, event)
                if isinstance(event, (Trials, Outcome)):
                    self.store.log(place, event.timings)
                if isinstance(event, Outcome):
                    outcomes.append(event)
        return outcomes, frozenset(task.shape for task in workers.left())


def _usable(registry: Registry, op: Op, options: Options) -> list[Backend]:
    backends = registry.select(options.libtype)
    if not any(op.name in backend.ops for backend in backends):
        covered = "; ".join(f"{backend.libtype} covers {', '.join(backend.ops)}" for backend in backends) or "none is installed"
        raise LibtypeError(f"no backend of --libtype {options.libtype} covers the op {op.name}: {covered}")
    return backends


def _identity(options: Options, backends: Sequence[Backend]) -> dict[str, str]:
    """Return the options and versions that must be equal for trials to be reused."""
    versions = {f"{backend.libtype} of {backend.distribution}": backend.version for backend in backends}
    plugin_options = [option for backend in backends for option in backend.options]
    return {
        "tunedgemm": __version__,
        "measure": MEASURE,
        "torch": importlib.metadata.version("torch"),
        **versions,
        **{option.variable: option.value() for option in plugin_options if option.value() != option.default},
        **{name: str(getattr(options, name)) for name in _IDENTITY_OPTIONS},
    }


__all__ = ["Options", "Outcome", "Report", "Terminated", "stopped_by_sigterm", "tune"]
