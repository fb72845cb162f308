"""Executors start device tuners, here (`local`) or on a cluster (`GROUP`); `work` keeps them busy."""

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

#: Entry points of executors: functions with the arguments of `device_tuners`.
GROUP = "tunedgemm.executors"
#: An event of a device tuner, an error in it, or None when it has no task left.
Events = queue.SimpleQueue[tuple[Place, Event | Exception | None]]


class AnyDeviceTuner(Protocol):
    """A `tunedgemm.tuner.device_tuner.DeviceTuner`, or its proxy for one in another process."""

    @property
    def place(self) -> Place:
        """Return the device and its node."""

    ranks: Mapping[str, int]
    versions: Mapping[str, str]

    def stop(self) -> None:
        """End whatever is running."""

    def ahead(self, task: Task) -> None:
        """Compile the solutions of a later shape."""

    def tune(self, task: Task, earlier: Sequence[Timing], emit: Callable[[Event], None], deadline: float = ...) -> None:
        """Tune one shape; raise DeviceLost if the device stops working."""


def device_tuners(
    op: Op, options: Options, ranks: Mapping[str, int], registry: Registry | None, bench: Bench | None
) -> contextlib.AbstractContextManager[Sequence[AnyDeviceTuner]]:
    """Return the context in which the device tuners of ``options.executor`` run."""
    from tunedgemm.tuner.executors import local

    is_local = options.executor == "local"
    make = local.device_tuners if is_local else load_extra(GROUP, options.executor, f"--executor {options.executor}")
    made: contextlib.AbstractContextManager[Sequence[AnyDeviceTuner]] = make(op, options, ranks, registry, bench)
    return made


@attrs.define(eq=False)
class WorkerGroup:
    """Device tuners of one kind of device, and the tasks that they share.

    A device tuner claims some tasks ahead, so that they compile while another is timed. An idle one
    takes over tasks that another has claimed and not begun. A task is measured on one device.

    Attributes:
        tuners: the device tuners, begun.
        tasks: the tasks, in order.
        earlier: final timings of earlier runs by shape.
        ahead: most tasks that a device tuner claims.
        deadline: `time.monotonic` after which no task begins.
        spent: whether the time until then was too short for a task.
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
        """Start a thread for each device tuner; return how many.

        The queue receives (place, event) for each event, and (place, None) when a thread ends.
        """
        self._claimed = {number: deque() for number in range(len(self.tuners))}
        for number, tuner in enumerate(self.tuners):
            threading.Thread(target=self._work, args=(number, tuner, events), name=f"tuner {tuner.place}", daemon=True).start()
        return len(self.tuners)

    def stop(self) -> None:
        """Begin no more tasks, and end those that run."""
        self._stopping = True
        for tuner in self.tuners:
            with contextlib.suppress(Exception):  # its node may be gone
                tuner.stop()

    def left(self) -> list[Task]:
        """Return the tasks that were not begun, or were lost with their devices."""
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
                task = None  # done: a device lost later must not hand it back
                self._task_done()
        except DeviceLost as error:
            if isinstance(error, BudgetSpent):
                self.spent = True
            elif not self._stopping:
                _log.warning("%s is lost: %s", tuner.place, error)
            self._hand_back(number, task)
        except BaseException as error:  # a bug: without it in the queue, the run would wait for this thread for ever
            events.put((tuner.place, error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")))
        events.put((tuner.place, None))

    def _next(self, number: int, tuner: AnyDeviceTuner) -> Task | None:
        """Claim enough tasks for the compilers and return the next one; None once no task can return."""
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
    """Yield the events of all groups until no task is left; closing the generator stops the devices.

    Raises:
        Exception: a bug raised it in a device tuner.
    """
    events: Events = queue.SimpleQueue()
    busy = sum(group.run(events) for group in groups)
    try:
        while busy:
            try:
                place, event = events.get(timeout=0.5)  # some systems deliver Ctrl-C only after a wait with a limit
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
