"""Executors make lanes: `local` of this machine's devices, `ray` of a cluster's. Here is the loop that keeps lanes busy."""

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

from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.timing import Timing
from tunedgemm.tuner.remote import LaneLost
from tunedgemm.tuner.trial import Event, Place, Task, Trials

_log = logging.getLogger("tunedgemm")

#: What lanes tell: an event, what went wrong in them, or None once they have nothing left to do.
Events = queue.SimpleQueue[tuple[Place, Event | Exception | None]]


class Lanelike(Protocol):
    """A `tunedgemm.tuner.lane.Lane`, or what stands for one in another process."""

    place: Place
    places: Mapping[str, int]
    versions: Mapping[str, str]

    def begin(self) -> None:
        """Make sure that there is a device, and learn which."""

    def stop(self) -> None:
        """End whatever is running."""

    def ahead(self, task: Task) -> None:
        """Have a shape compiled that will be tuned soon."""

    def tune(self, task: Task, known: Sequence[Timing], tell: Callable[[Event], None], deadline: float = ...) -> None:
        """Tune one shape; raises LaneLost where the device stops working."""


@attrs.define(eq=False)
class Crew:
    """Lanes of one kind of device, and the tasks that they share.

    A lane claims some tasks ahead, so that they compile while another is timed; a lane with nothing
    left takes over what another has claimed and not begun. Each task is one lane's from its first
    to its last measurement.

    Attributes:
        lanes: they have begun.
        tasks: what is to be done, in order.
        known: timings of earlier runs by shape, which need not be done again.
        ahead: most tasks that a lane claims.
        deadline: `time.monotonic` after which no task is begun.
    """

    lanes: Sequence[Lanelike]
    tasks: deque[Task]
    known: Mapping[Shape, Sequence[Timing]] = attrs.field(factory=dict)
    ahead: int = 100
    deadline: float = float("inf")
    _claimed: dict[int, deque[Task]] = attrs.field(factory=dict, init=False)
    _told: dict[Shape, dict[Solution, Timing]] = attrs.field(factory=dict, init=False)
    _changed: threading.Condition = attrs.field(factory=threading.Condition, init=False)
    _running: int = attrs.field(default=0, init=False)
    _stopping: bool = attrs.field(default=False, init=False)

    def run(self, events: Events) -> int:
        """Start the lanes and return how many; (place, event) of each goes to the queue, and (place, None) when it is done."""
        self._claimed = {number: deque() for number in range(len(self.lanes))}
        for number, lane in enumerate(self.lanes):
            threading.Thread(target=self._work, args=(number, lane, events), name=f"lane {lane.place}", daemon=True).start()
        return len(self.lanes)

    def stop(self) -> None:
        """Begin nothing more, and end what is running."""
        self._stopping = True
        for lane in self.lanes:
            with contextlib.suppress(Exception):  # a node may be gone
                lane.stop()

    def left(self) -> list[Task]:
        """The tasks that no lane has begun, or that were lost with their lanes."""
        with self._changed:
            return [*self.tasks, *(task for claimed in self._claimed.values() for task in claimed)]

    def _work(self, number: int, lane: Lanelike, events: Events) -> None:
        task: Task | None = None
        try:
            while (task := self._next(number, lane)) is not None:
                told = self._told.setdefault(task.shape, {})

                def tell(event: Event, told: dict[Solution, Timing] = told) -> None:
                    if isinstance(event, Trials):
                        told.update({timing.solution: timing for timing in event.timings})
                    events.put((lane.place, event))

                known = {timing.solution: timing for timing in (*self.known.get(task.shape, ()), *told.values())}
                lane.tune(task, tuple(known.values()), tell, self.deadline)
                task = None  # it is done: a lane lost while it claims others has nothing of it to hand back
                self._done()
        except LaneLost as error:
            if not self._stopping:
                _log.warning("%s is lost: %s", lane.place, error)
            self._hand_back(number, task)
        except BaseException as error:  # a fault of ours: the run ends with it, or would wait for this lane for ever
            events.put((lane.place, error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")))
        events.put((lane.place, None))

    def _next(self, number: int, lane: Lanelike) -> Task | None:
        """The lane's next task, after claiming enough for its compilers; None once nobody can hand one back any more."""
        claimed = self._claimed[number]
        while not self._over():
            with self._changed:
                fair = -(-len(self.tasks) // (2 * len(self.lanes)))
                if not self.tasks or len(claimed) >= min(self.ahead, max(fair, 2)):
                    break
                fresh = self.tasks.popleft()
                claimed.append(fresh)
            lane.ahead(fresh)
        with self._changed:
            while not self._over():
                longest = max(self._claimed.values(), key=len)
                if claimed or longest or self.tasks:
                    self._running += 1
                    return claimed.popleft() if claimed else longest.pop() if longest else self.tasks.popleft()
                if not self._running:
                    break
                self._changed.wait(timeout=0.5)
        return None

    def _over(self) -> bool:
        return self._stopping or time.monotonic() >= self.deadline

    def _done(self) -> None:
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    def _hand_back(self, number: int, task: Task | None) -> None:
        with self._changed:
            mine = self._claimed[number]
            self.tasks.extendleft(reversed([*([task] if task else []), *mine]))
            mine.clear()
            self._running -= task is not None
            self._changed.notify_all()


def work(crews: Sequence[Crew]) -> Generator[tuple[Place, Event]]:
    """What the lanes of all crews tell, until nothing is left to do; leaving the loop early stops the lanes for good.

    Raises:
        Exception: what went wrong in a lane that was nobody's fault but ours.
    """
    events: Events = queue.SimpleQueue()
    busy = sum(crew.run(events) for crew in crews)
    try:
        while busy:
            try:
                place, event = events.get(timeout=0.5)  # without a limit it would keep Ctrl-C waiting on some systems
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
            for crew in crews:
                crew.stop()
