"""Executors: start device tuners, here (`local`) or on a cluster (`GROUP`), and give them tasks."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Protocol

import attrs

from tunedgemm.backends.registry import Registry
from tunedgemm.ops.op import Op
from tunedgemm.process.plugin_guard import load_extra
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.timing import Timing
from tunedgemm.tuner.trial import Bench, Event, Options, Place, Task, Trials
from tunedgemm.tuner.worker_client import BudgetSpent, DeviceLost

_log = logging.getLogger("tunedgemm")

#: Entry point group of executors: functions with the signature of `device_tuners`.
GROUP = "tunedgemm.executors"
#: Queue of (place, item): an event of a device tuner, its error, or None when it has finished.
Events = queue.SimpleQueue[tuple[Place, Event | Exception | None]]


class AnyDeviceTuner(Protocol):
    """Protocol of `tunedgemm.tuner.device_tuner.DeviceTuner` and its remote proxies."""

    @property
    def place(self) -> Place:
        """Return the device and its node."""

    ranks: Mapping[str, int]
    versions: Mapping[str, str]

    def stop(self) -> None:
        """Stop what is running."""

    def ahead(self, task: Task) -> None:
        """Compile the solutions of an upcoming shape."""

    def tune(self, task: Task, earlier: Sequence[Timing], emit: Callable[[Event], None], deadline: float = ...) -> None:
        """Tune one shape; raise DeviceLost if the device stops working."""


def device_tuners(
    op: Op, options: Options, ranks: Mapping[str, int], registry: Registry | None, bench: Bench | None
) -> contextlib.AbstractContextManager[Sequence[AnyDeviceTuner]]:
    """Return a context manager of the device tuners of ``options.executor``."""
    from tunedgemm.tuner.executors import local

    is_local = options.executor == "local"
    make = local.device_tuners if is_local else load_extra(GROUP, options.executor, f"--executor {options.executor}")
    made: contextlib.AbstractContextManager[Sequence[AnyDeviceTuner]] = make(op, options, ranks, registry, bench)
    return made


@attrs.define(eq=False)
class WorkerGroup:
    """Device tuners of one kind of device, which share a list of tasks.

    A device tuner claims tasks ahead, which compile while another is timed. An idle one steals
    tasks that another has claimed but not started.

    Attributes:
        tuners: the started device tuners.
        tasks: the unclaimed tasks, in order.
        earlier: final timings of earlier runs by shape.
        ahead: most tasks that a device tuner claims ahead.
        deadline: `time.monotonic` after which no task starts.
        spent: whether a task was not finished by then.
    """

    tuners: Sequence[AnyDeviceTuner]
    tasks: deque[Task]
    earlier: Mapping[Shape, Sequence[Timing]] = attrs.field(factory=dict)
    ahead: int = 100
    deadline: float = float("inf")
    spent: bool = attrs.field(default=False, init=False)
    _claimed: dict[int, deque[Task]] = attrs.field(factory=dict, init=False)
    _final: dict[Shape, dict[Solution, Timing]] = attrs.field(factory=dict, init=False)
    _changed: threading.Condition = attrs.field(factory=threading.Condition, init=False)
    _running: int = attrs.field(default=0, init=False)
    _stopping: bool = attrs.field(default=False, init=False)

    def run(self, events: Events) -> int:
        """Start a thread per device tuner; return the number of threads.

        The queue receives (place, event) for each event, and (place, None) when a thread ends.
        """
        self._claimed = {number: deque() for number in range(len(self.tuners))}
        for number, tuner in enumerate(self.tuners):
            threading.Thread(target=self._work, args=(number, tuner, events), name=f"tuner {tuner.place}", daemon=True).start()
        return len(self.tuners)

    def stop(self) -> None:
        """Start no more tasks, and stop the running ones."""
        self._stopping = True
        for tuner in self.tuners:
            with contextlib.suppress(Exception):  # its node may be gone
                tuner.stop()

    def left(self) -> list[Task]:
        """Return the tasks that were not started, or were lost with their devices."""
        with self._changed:
            return [*self.tasks, *(task for claimed in self._claimed.values() for task in claimed)]

    def _work(self, number: int, tuner: AnyDeviceTuner, events: Events) -> None:
        task: Task | None = None
        try:
            while (task := self._next(number, tuner)) is not None:
                final = self._final.setdefault(task.shape, {})

                def emit(event: Event, final: dict[Solution, Timing] = final) -> None:
                    if isinstance(event, Trials):
                        final.update({timing.solution: timing for timing in event.timings})
                    events.put((tuner.place, event))

                earlier = {timing.solution: timing for timing in (*self.earlier.get(task.shape, ()), *final.values())}
                tuner.tune(task, tuple(earlier.values()), emit, self.deadline)
                task = None  # done; a device lost later must not return it
                self._task_done()
        except DeviceLost as error:
            if isinstance(error, BudgetSpent):
                self.spent = True
            elif not self._stopping:
                _log.warning("%s is lost: %s", tuner.place, error)
            self._hand_back(number, task)
        except BaseException as error:  # a bug: unless queued, the run would wait for this thread forever
            events.put((tuner.place, error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")))
        events.put((tuner.place, None))

    def _next(self, number: int, tuner: AnyDeviceTuner) -> Task | None:
        """Claim tasks for the compilers and return the next one; None once all are done."""
        claimed = self._claimed[number]
        while not self._is_over():
            with self._changed:
                fair = -(-len(self.tasks) // (2 * len(self.tuners)))
                if not self.tasks or len(claimed) >= min(self.ahead, max(fair, 2)):
                    break
                fresh = self.tasks.popleft()
                claimed.append(fresh)
            tuner.ahead(fresh)
        with self._changed:
            while not self._is_over():
                longest = max(self._claimed.values(), key=len)
                if claimed or longest or self.tasks:
                    self._running += 1
                    return claimed.popleft() if claimed else longest.pop() if longest else self.tasks.popleft()
                if not self._running:
                    break
                self._changed.wait(timeout=0.5)
        return None

    def _is_over(self) -> bool:
        return self._stopping or time.monotonic() >= self.deadline

    def _task_done(self) -> None:
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    def _hand_back(self, number: int, task: Task | None) -> None:
        with self._changed:
            claimed = self._claimed[number]
            self.tasks.extendleft(reversed([*([task] if task else []), *claimed]))
            claimed.clear()
            self._running -= task is not None
            self._changed.notify_all()


def work(groups: Sequence[WorkerGroup]) -> Generator[tuple[Place, Event]]:
    """Yield the events of all groups until no task is left; closing the generator stops them.

    Raises:
        Exception: a bug in a device tuner.
    """
    events: Events = queue.SimpleQueue()
    busy = sum(group.run(events) for group in groups)
    try:
        while busy:
            try:
                place, event = events.get(timeout=0.5)  # some systems deliver Ctrl-C only if the wait has a timeout
            except queue.Empty:
                continue
            if isinstance(event, Exception):
                raise event
            if event is None:
                busy -= 1
            else:
                yield place, event
    finally:
        if busy:
            for group in groups:
                group.stop()
