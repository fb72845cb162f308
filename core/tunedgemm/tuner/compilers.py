"""Compilers: a process pool that compiles kernels ahead of timing, on all cores.

A crash costs one candidate. The processes do not import torch, so a large pool starts fast. At most
one task per process is queued, so that an awaited task runs next.
"""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Future, wait
from concurrent.futures import TimeoutError as Overdue

import attrs
from pebble import ProcessExpired

from tunedgemm.backends.backend import Backend
from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported
from tunedgemm.timing import Timing
from tunedgemm.tuner.processes import NeverBegan, SpawnedPool, cpu_seconds, exit_reason

_log = logging.getLogger("tunedgemm")

#: Seconds after which a stalled pool is replaced: tasks wait, but its processes use no CPU time.
_STALLED = 20.0

#: Seconds after which a compilation is long, and a budget no longer waits for it. nvcc takes a
#: minute for a kernel, Triton one to three seconds.
_LONG = 10.0

#: One compilation: its device, shape and solution.
Task = tuple[Device, Shape, Solution]


@attrs.frozen(eq=False)
class _Job:
    """A compilation submitted to a pool; its result is the error, or ""."""

    pool: SpawnedPool
    future: Future[str]
    libtype: str
    begun: float = attrs.field(factory=time.monotonic)

    @property
    def is_long(self) -> bool:
        """Check whether it has run for `_LONG`."""
        return time.monotonic() - self.begun >= _LONG


class Compilers:
    """The compiler pool of this machine, which its device tuners share; starts on demand.

    Args:
        jobs: number of processes; 0 for one per core.
        timeout: time limit of one compilation, in seconds; 0 for none.
        registry: the backends; those without a `prepare` hook compile nothing ahead.
    """

    def __init__(self, jobs: int = 0, timeout: float = 0.0, registry: Registry | None = None) -> None:
        self._size = jobs or len(os.sched_getaffinity(0))
        self._timeout, self._registry = timeout, registry or Registry()
        self._pool: SpawnedPool | None = None
        self._retired: list[threading.Thread] = []
        self._waiting: dict[Task, None] = {}
        self._spare: dict[Task, None] = {}  # compiled while nothing waits
        self._pending: dict[Task, _Job] = {}
        self._libtypes: set[str] = set()  # of all tasks
        self._running: set[_Job] = set()
        self._ended: Counter[tuple[str, bool]] = Counter()  # compilations by libtype and whether they were long
        self._awake: SpawnedPool | None = None  # the pool known to have started
        self._idle: tuple[float, float] | None = None  # (time, CPU seconds of the processes) at which a stall began
        self._stopped = ""  # why compiling ahead was given up
        self._unbegun = 0  # consecutive pools in which no process started
        self._lock = threading.RLock()  # a task may end before its callback is added

    def start(self, libtypes: Iterable[str]) -> None:
        """Start the processes if a backend compiles ahead.

        They import the backends while the workers start.
        """
        compiled = [libtype for libtype in libtypes if self._prepares(libtype)]
        if compiled:
            with self._lock:
                pool = self._running_pool()
                for _ in range(self._size):  # a pool starts its processes with the first task
                    pool.schedule(_load, args=[compiled]).add_done_callback(lambda _: self._on_wake(pool))

    def begin(self, shape: Shape, solutions: Iterable[Solution], device: Device, *, spare: bool = False, first: bool = False) -> None:
        """Compile solutions in the background; skip those already begun.

        *Spare* ones are compiled while no others wait; *first* ones before all others.
        """
        tasks = [(device, shape, solution) for solution in solutions if self._prepares(solution.libtype)]
        with self._lock:
            for task in tasks:
                if task not in self._pending and not self._stopped:
                    self._libtypes.add(task[2].libtype)
                    self._spare.pop(task, None)
                    (self._spare if spare else self._waiting)[task] = None
            self._feed()
        if first:
            self._feed_first(tasks)

    def drop(self, shape: Shape, device: Device) -> None:
        """Forget the compilations of a finished shape; those that run go on."""
        with self._lock:
            for tasks in (self._waiting, self._spare, self._pending):
                for task in [task for task in tasks if task[:2] == (device, shape)]:
                    del tasks[task]

    def _feed(self) -> None:
        """Submit jobs to idle processes; the caller holds the lock."""
        self._look()
        while len(self._running) < self._size and not self._stopped and (task := self._next()):
            self._schedule(task)

    def _next(self) -> Task | None:
        """Return the waiting task, else the spare one, whose libtype has the fewest processes.

        Of several libtypes, a slow one gets at most half of the processes. So the others, of which
        a search asks for more at any moment, never wait for its end.
        """
        running = Counter(job.libtype for job in self._running)
        full = {libtype for libtype, number in running.items() if 2 * number >= self._size and self._is_slow(libtype)}
        full = full if len(self._libtypes) > 1 else set()
        for tasks in (self._waiting, self._spare):
            if possible := [task for task in tasks if task[2].libtype not in full]:
                return min(possible, key=lambda task: running[task[2].libtype])
        return None

    def _schedule(self, task: Task) -> None:
        """Submit a waiting task; the caller holds the lock."""
        pool = self._running_pool()
        job = self._pending[task] = _Job(pool, pool.schedule(_prepare, args=task, timeout=self._timeout or None), task[2].libtype)
        self._waiting.pop(task, None)
        self._spare.pop(task, None)
        self._running.add(job)
        job.future.add_done_callback(lambda _: self._on_end(job))

    def _on_end(self, job: _Job) -> None:
        with self._lock:
            self._on_wake(job.pool)
            if job in self._running:
                self._running.remove(job)
                self._ended[job.libtype, job.is_long] += 1
            self._feed()

    def _look(self) -> None:
        """Give up after two pools broke before a process started; the caller holds the lock."""
        if self._unbegun and self._pool is not None and not self._pool.active and not self._stopped:
            try:
                self._pool.check_begun()
            except NeverBegan as error:
                self._stopped = f"the compilers: {error}"
                self._waiting.clear()
                self._spare.clear()

    def _on_wake(self, pool: SpawnedPool) -> None:
        self._awake = pool

    def _feed_first(self, tasks: Iterable[Task]) -> None:
        with self._lock:
            self._look()
            for task in tasks:
                if task in self._waiting:
                    self._schedule(task)

    def _put_first(self, tasks: Iterable[Task]) -> None:
        with self._lock:
            self._waiting = {task: None for task in tasks if task in self._waiting} | self._waiting
            self._feed()

    def finish(self, shape: Shape, solutions: Iterable[Solution], device: Device) -> list[Timing]:
        """Wait for compilations; return a Timing for each that failed."""
        solutions = tuple(solutions)
        self.begin(shape, solutions, device, first=True)
        lost = []
        for solution in solutions:
            status, reason = self._failure_of(shape, solution, device)
            if status:
                lost.append(Timing(shape, solution, status, detail=reason[:500]))
        return lost

    def compiled(self, shape: Shape, solutions: Iterable[Solution], device: Device) -> list[Solution]:
        """Return the solutions that need no more compilation."""
        with self._lock:
            jobs = {solution: self._pending.get((device, shape, solution)) for solution in solutions}
            waiting = {solution for solution in jobs if (device, shape, solution) in self._waiting}
        return [solution for solution, job in jobs.items() if solution not in waiting and (job is None or job.future.done())]

    def ready(self, shape: Shape, solutions: Sequence[Solution], device: Device, deadline: float) -> list[Solution]:
        """Wait until *deadline* (`time.monotonic`); return the solutions compiled by then.

        Those of a slow libtype are waited for only while no other libtype has compiled one. They go
        on, and may be ready for a later shape. A libtype's few long ones are not waited for.
        """
        self.begin(shape, solutions, device)
        while True:
            self._put_first((device, shape, solution) for solution in solutions)
            compiled = self.compiled(shape, solutions, device)
            awaited = self._awaited(shape, solutions, compiled, device)
            left = deadline - time.monotonic()
            if left <= 0 or not awaited:
                return compiled
            with self._lock:  # the end of any lets a waiting one begin
                jobs = {job for job in awaited if job is not None} | self._running
            wait([job.future for job in jobs], timeout=min(left, 1.0), return_when=FIRST_COMPLETED)

    def _awaited(self, shape: Shape, solutions: Iterable[Solution], compiled: Collection[Solution], device: Device) -> list[_Job | None]:
        """Return the compilations that a budget waits for; None for one that has not begun."""
        others = {solution.libtype for solution in compiled if self._prepares(solution.libtype)}
        awaited = []
        with self._lock:
            for solution in solutions:
                job = self._pending.get((device, shape, solution))
                is_slow = self._is_slow(solution.libtype)
                is_late = bool(others - {solution.libtype}) if is_slow else job is not None and job.is_long
                if solution not in compiled and not is_late:
                    awaited.append(job)
        return awaited

    def _is_slow(self, libtype: str) -> bool:
        """Check whether most compilations of a libtype are long, of those that tell."""
        long = self._ended[libtype, True] + sum(job.is_long for job in self._running if job.libtype == libtype)
        return long > self._ended[libtype, False]

    def drain(self, deadline: float = math.inf) -> None:
        """Wait until *deadline* (`time.monotonic`) for all compilations, which would disturb timing on a CPU."""
        awaited: set[_Job] = set()
        while time.monotonic() < deadline:
            with self._lock:
                self._waiting |= self._spare
                self._feed_first(list(self._waiting))
                jobs = set(self._pending.values()) - awaited
            if not jobs:
                return
            for job in jobs:
                with contextlib.suppress(BrokenExecutor):
                    self._await(job, deadline)
            awaited |= jobs

    def _failure_of(self, shape: Shape, solution: Solution, device: Device) -> tuple[str, str]:
        """Return status and error of a compilation, "" on success; repeat it if the pool broke."""
        task = device, shape, solution
        for _ in range(3):
            with self._lock:
                job = self._pending.pop(task, None)
            if job is None:
                return ("compile_failed", self._stopped) if self._stopped else ("", "")
            try:
                self._await(job)
                reason = job.future.result()
            except (BrokenExecutor, CancelledError):
                self.begin(shape, [solution], device, first=True)
            except Overdue:
                return "compile_timeout", f"it took more than {self._timeout:g} s"
            except ProcessExpired as error:
                return "compile_failed", f"the compiler died: {exit_reason(error.exitcode)}"
            else:
                return ("out_of_resources" if reason.startswith("OutOfResources") else "compile_failed" if reason else ""), reason
        with self._lock:
            self._pending.pop(task, None)
        return "compile_failed", "the compilers died"

    def _await(self, job: _Job, deadline: float = math.inf) -> None:
        """Wait for the end of a job, or until *deadline*.

        Raises:
            BrokenExecutor: the pool ended first, or stalled and was stopped.
        """
        pool, future = job.pool, job.future
        while not future.done() and (left := deadline - time.monotonic()) > 0:
            if not pool.active and not future.done():  # it never reports tasks that it had not started
                raise BrokenExecutor
            if not wait([future], timeout=min(left, 1.0)).done and self._is_stalled(pool, future):
                _log.warning("compilers: no task began for %g s and all are idle; new ones take over", _STALLED)
                pool.stop()
                raise BrokenExecutor

    def _is_stalled(self, pool: SpawnedPool, future: Future[str]) -> bool:
        """Check whether a pool no longer hands out tasks.

        A process killed while fetching a task loses it, or keeps the queue's lock.
        """
        with self._lock:
            tasks = {future, *(job.future for job in self._running)}
            begun = sum(task.running() for task in tasks)
            if self._awake is not pool or begun >= self._size or all(task.running() or task.done() for task in tasks):
                self._idle = None
                return False
            now, used = time.monotonic(), sum(cpu_seconds(child.pid) for child in multiprocessing.active_children())
            if self._idle is None or used > self._idle[1] + 1.0:
                self._idle = now, used
            if now - self._idle[0] < _STALLED:
                return False
            self._idle = None
            return True

    def _prepares(self, libtype: str) -> bool:
        backend = self._registry.get(libtype)
        return isinstance(backend, Backend) and "prepare" in backend.functions

    def _running_pool(self) -> SpawnedPool:
        """Return the pool, replaced if it broke; a crash while idle blames no task."""
        if self._pool is not None and not self._pool.active:
            self._unbegun = 0 if self._pool.has_begun else self._unbegun + 1
            self._pool.stop()
            # Joined in a thread, because a thread of the pool may wait for the lock.
            self._retired.append(threading.Thread(target=self._pool.join, daemon=True))
            self._retired[-1].start()
            self._running.clear()
            self._pool = None
        self._pool = self._pool or SpawnedPool(self._size)
        return self._pool

    def stop(self) -> None:
        """Kill the processes."""
        with self._lock:
            pool, self._pool, self._stopped = self._pool, None, "stopped"
            self._waiting.clear()
            self._spare.clear()
        if pool is not None:
            pool.stop()
            pool.join()
        for thread in self._retired:
            thread.join()


_registry: Registry | None = None


def _load(libtypes: Iterable[str]) -> None:
    """Import backends in the child."""
    for libtype in libtypes:
        _backend(libtype)


def _backend(libtype: str) -> Backend | Unsupported:
    global _registry
    if _registry is None:
        _registry = Registry()
    return _registry.get(libtype)


def _prepare(device: Device, shape: Shape, solution: Solution) -> str:
    """Compile one solution in the child; return the error, or ""."""
    backend = _backend(solution.libtype)
    if not isinstance(backend, Backend):
        return str(backend)
    try:
        backend.prepare(solution, shape, attrs.evolve(device, index=-1))  # absent here, so `supports` loads no library
    except BaseException as error:  # a compiler may raise anything; a SystemExit would end the caller
        return f"{type(error).__name__}: {error}"
    return ""
