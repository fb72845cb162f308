"""Compilers: kernels are compiled ahead of timing, on all cores, in processes whose exit_reason costs one candidate.

The processes import no torch, so that a pool of many is there at once. Of what is only begun ahead
it gets no more at a time than it has processes, so that what is waited for comes next, however much
was begun.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import BrokenExecutor, CancelledError, Future, wait
from concurrent.futures import TimeoutError as Overdue

from pebble import ProcessExpired, ProcessPool

from tunedgemm.backends.registry import Backend, Registry
from tunedgemm.device import Device
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported
from tunedgemm.timing import Timing
from tunedgemm.tuner.processes import cpu_seconds, exit_reason, spawned_pool

_log = logging.getLogger(__name__)

#: Seconds for which a pool may begin nothing of what it was given while processes of it have nothing to do, which use no time either.
_STALLED = 20.0

#: What is compiled: for which device, for which shape, and what.
Task = tuple[Device, Shape, Solution]


class Compilers:
    """A pool of compiling processes on this machine, shared by its lanes and started when it is first needed.

    Args:
        jobs: how many processes; 0 is one for each core.
        timeout: seconds that one compilation may take; 0 is no limit.
        registry: the backends; those without a `prepare` hook need no process.
    """

    def __init__(self, jobs: int = 0, timeout: float = 0.0, registry: Registry | None = None) -> None:
        self._size = jobs or len(os.sched_getaffinity(0))
        self._timeout, self._registry = timeout, registry or Registry()
        self._pool: ProcessPool | None = None
        self._retired: list[threading.Thread] = []
        self._waiting: dict[Task, None] = {}
        self._pending: dict[Task, tuple[ProcessPool, Future[str]]] = {}
        self._running: set[Future[str]] = set()
        self._awake: ProcessPool | None = None  # the pool whose processes are known to have started
        self._idle: tuple[float, float] | None = None  # since when the pool begins nothing, and the processes' seconds at that time
        self._stopped = False
        self._lock = threading.RLock()  # a task may be over when its end is asked to be told

    def start(self, libtypes: Iterable[str]) -> None:
        """Start the processes where one of these backends compiles ahead: they load it while the devices' workers start."""
        compiled = [libtype for libtype in libtypes if self._prepares(libtype)]
        if compiled:
            with self._lock:
                pool = self._started()
                for _ in range(self._size):  # a pool starts its processes with the first task
                    pool.schedule(_load, args=[compiled]).add_done_callback(lambda _: self._woke(pool))

    def begin(self, shape: Shape, solutions: Iterable[Solution], device: Device) -> None:
        """Have solutions compiled; what was begun already is not begun again."""
        for solution in solutions:
            task = device, shape, solution
            if self._prepares(solution.libtype):
                with self._lock:
                    if task not in self._pending and not self._stopped:
                        self._waiting[task] = None
                        self._feed()

    def _feed(self) -> None:
        """Give the pool what it has processes for; the lock is held."""
        while self._waiting and len(self._running) < self._size and not self._stopped:
            self._schedule(next(iter(self._waiting)))

    def _schedule(self, task: Task) -> None:
        """Give the pool one that waits; the lock is held."""
        del self._waiting[task]
        device, shape, solution = task
        pool = self._started()
        future = pool.schedule(_prepare, args=[solution, shape, device], timeout=self._timeout or None)
        self._pending[task] = pool, future
        self._running.add(future)
        future.add_done_callback(lambda future: self._ended(pool, future))

    def _ended(self, pool: ProcessPool, future: Future[str]) -> None:
        with self._lock:
            self._woke(pool)
            self._running.discard(future)
            self._feed()

    def _woke(self, pool: ProcessPool) -> None:
        self._awake = pool

    def _first(self, tasks: Iterable[Task]) -> None:
        """Give the pool those that wait among some."""
        with self._lock:
            for task in tasks:
                if task in self._waiting and not self._stopped:
                    self._schedule(task)

    def finish(self, shape: Shape, solutions: Iterable[Solution], device: Device) -> list[Timing]:
        """Wait for solutions; returns a Timing of status ``compile_failed`` or the like for each that did not compile."""
        self.begin(shape, solutions, device)
        self._first((device, shape, solution) for solution in solutions)
        lost = []
        for solution in solutions:
            status, reason = self._finished(shape, solution, device)
            if status:
                lost.append(Timing(shape, solution, status, detail=reason[:500]))
        return lost

    def drain(self) -> None:
        """Wait for everything begun: on a CPU, compilers beside a timing would be part of it."""
        with self._lock:
            self._first(list(self._waiting))
            pending = list(self._pending.values())
        for pool, future in pending:
            with contextlib.suppress(BrokenExecutor):
                self._result(pool, future)

    def _finished(self, shape: Shape, solution: Solution, device: Device) -> tuple[str, str]:
        """How a compilation failed; it is begun once more where its pool broke, which is not its fault."""
        for _ in range(2):
            with self._lock:
                pool, future = self._pending.pop((device, shape, solution), (None, None))
            if pool is None or future is None:
                return ("compile_failed", "stopped") if self._stopped else ("", "")
            try:
                return self._result(pool, future)
            except BrokenExecutor:
                self.begin(shape, [solution], device)
                self._first([(device, shape, solution)])
        with self._lock:
            self._pending.pop((device, shape, solution), None)
        return "compile_failed", "the compilers died"

    def _result(self, pool: ProcessPool, future: Future[str]) -> tuple[str, str]:
        """The status of a compilation and what went wrong, both "" where nothing did.

        Raises:
            BrokenExecutor: its pool ended before it was done, or began nothing any more and was
                ended.
        """
        while not wait([future], timeout=1.0).done:
            if not pool.active and not future.done():  # what such a pool had not begun it never tells of
                raise BrokenExecutor
            if self._stalls(pool, future):
                _log.warning("compilers: nothing began for %g s and none of them works; others take over", _STALLED)
                pool.stop()
                raise BrokenExecutor
        try:
            reason = future.result()
        except Overdue:
            return "compile_timeout", f"it took more than {self._timeout:g} s"
        except ProcessExpired as error:
            return "compile_failed", f"the compiler died: {exit_reason(error.exitcode)}"
        except CancelledError:
            raise BrokenExecutor from None
        if not reason:
            return "", ""
        return "out_of_resources" if reason.startswith("OutOfResources") else "compile_failed", reason

    def _stalls(self, pool: ProcessPool, future: Future[str]) -> bool:
        """Whether a pool no longer hands out tasks: a process killed while it fetches one takes it, or the lock of their queue, along."""
        with self._lock:
            given = [future, *(other for of, other in self._pending.values() if of is pool)]
            begun = sum(each.running() for each in given)
            if self._awake is not pool or begun >= self._size or all(each.running() or each.done() for each in given):
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
        return isinstance(backend, Backend) and "prepare" in backend.hooks

    def _started(self) -> ProcessPool:
        """The pool, another one where it broke: that a process of it died idle says nothing about what comes next."""
        if self._pool is not None and not self._pool.active:
            self._pool.stop()
            # Its processes end as it is joined; not here, for a thread of it may wait for the lock,
            # to tell that a task is over.
            self._retired.append(threading.Thread(target=self._pool.join, daemon=True))
            self._retired[-1].start()
            self._running.clear()
            self._pool = None
        self._pool = self._pool or spawned_pool(self._size)
        return self._pool

    def stop(self) -> None:
        """End the processes, whatever they do."""
        with self._lock:
            pool, self._pool, self._stopped = self._pool, None, True
            self._waiting.clear()
        if pool is not None:
            pool.stop()
            pool.join()
        for thread in self._retired:
            thread.join()


_registry: Registry | None = None


def _load(libtypes: Iterable[str]) -> None:
    """In the child: import backends, and with them what they import."""
    for libtype in libtypes:
        _backend(libtype)


def _backend(libtype: str) -> Backend | Unsupported:
    global _registry
    if _registry is None:
        _registry = Registry()
    return _registry.get(libtype)


def _prepare(solution: Solution, shape: Shape, device: Device) -> str:
    """In the child: compile one solution; returns what went wrong, or ""."""
    backend = _backend(solution.libtype)
    if not isinstance(backend, Backend):
        return str(backend)
    try:
        backend.prepare(solution, shape, device)
    except BaseException as error:  # a compiler may raise anything, and what asks to exit would end whoever waits for it
        return f"{type(error).__name__}: {error}"
    return ""
