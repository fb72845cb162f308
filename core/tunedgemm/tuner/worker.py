"""Processes that may die: one for each device, where kernels run, and a pool in which they are compiled.

What raises, hangs or dies there costs one candidate; the process is replaced. A worker is asked for one thing at a time,
so whatever was asked for is to blame.
"""

from __future__ import annotations

import fcntl
import gc
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as Overdue
from multiprocessing.connection import wait
from typing import Any

from pebble import ProcessExpired, ProcessPool

from tunedgemm.device import Device
from tunedgemm.errors import TunedGemmError
from tunedgemm.registry import Backend, Registry
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported
from tunedgemm.timing import Timing
from tunedgemm.tuner.session import DeviceFault, Session

#: What a worker process makes its session of.
Maker = Callable[[], Session]


class Died(TunedGemmError):
    """A worker was lost while it did what it was asked for.

    Attributes:
        status: ``hung``, ``crashed`` or ``fault``.
    """

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class Inline:
    """A session in this very process, for registries and benches that cannot travel; what dies, dies here."""

    def __init__(self, make: Maker) -> None:
        self._session = make()

    def __call__(self, method: str, *arguments: Any, timeout: float = 0.0) -> Any:
        """The session's answer."""
        del timeout
        try:
            return getattr(self._session, method)(*arguments)
        except DeviceFault as error:
            raise Died("fault", str(error)) from error

    def stop(self) -> None:
        """There is nothing to stop."""


class Worker:
    """A session in a process of its own, started at the first call and again after it was lost."""

    def __init__(self, make: Maker) -> None:
        self._make = make
        self._pool: ProcessPool | None = None
        self._asked: Future[Any] | None = None
        self._stopped = False
        self._lock = threading.Lock()

    def __call__(self, method: str, *arguments: Any, timeout: float = 0.0) -> Any:
        """The session's answer to one call.

        Args:
            timeout: seconds that the call may take once it has begun; 0 is no limit.

        Raises:
            Died: the process was lost, or stopped by `stop`.
            Exception: what the session raised.
        """
        with self._lock:
            if self._stopped:
                raise Died("crashed", "stopped")
            self._pool = self._pool or _pool(1, self._make)
            self._asked = self._pool.schedule(_ask, args=[method, arguments], timeout=timeout or None)
        try:
            return self._asked.result()
        except Overdue:
            raise Died("hung", f"it took more than {timeout:g} s") from None
        except CancelledError:
            raise Died("crashed", "stopped") from None
        except ProcessExpired as error:
            raise Died("crashed", _death(error.exitcode)) from None
        except DeviceFault as error:
            self._drop()
            raise Died("fault", str(error)) from None

    def stop(self) -> None:
        """End the process, whatever it does; later calls raise `Died`."""
        with self._lock:
            self._stopped = True
            if self._asked is not None:
                self._asked.cancel()
        self._drop()

    def _drop(self) -> None:
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()
            pool.join()


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
        self._pending: dict[tuple[Device, Shape, Solution], Future[str]] = {}
        self._lock = threading.Lock()

    def start(self, libtypes: Iterable[str]) -> None:
        """Start the processes where one of these backends compiles ahead: they load it while the devices' workers start."""
        compiled = [libtype for libtype in libtypes if self._prepares(libtype)]
        if compiled:
            with self._lock:
                for _ in range(self._size):  # a pool starts its processes with the first task
                    self._started().schedule(_load, args=[compiled])

    def begin(self, shape: Shape, solutions: Iterable[Solution], device: Device) -> None:
        """Have solutions compiled; what was begun already is not begun again."""
        for solution in solutions:
            if self._prepares(solution.libtype):
                with self._lock:
                    if (device, shape, solution) not in self._pending:
                        future = self._started().schedule(_prepare, args=[solution, shape, device], timeout=self._timeout or None)
                        self._pending[device, shape, solution] = future

    def finish(self, shape: Shape, solutions: Iterable[Solution], device: Device) -> list[Timing]:
        """Wait for solutions; returns a Timing of status ``compile_failed`` or the like for each that did not compile."""
        self.begin(shape, solutions, device)
        lost = []
        for solution in solutions:
            with self._lock:
                future = self._pending.pop((device, shape, solution), None)
            status, reason = self._result(future) if future else ("", "")
            if status:
                lost.append(Timing(shape, solution, status, detail=reason[:500]))
        return lost

    def drain(self) -> None:
        """Wait for everything begun: on a CPU, compilers beside a timing would be part of it."""
        with self._lock:
            pending = list(self._pending.values())
        for future in pending:
            self._result(future)

    def _result(self, future: Future[str]) -> tuple[str, str]:
        try:
            reason = future.result()
        except Overdue:
            return "compile_timeout", f"it took more than {self._timeout:g} s"
        except ProcessExpired as error:
            return "compile_failed", f"the compiler died: {_death(error.exitcode)}"
        if not reason:
            return "", ""
        return "out_of_resources" if reason.startswith("OutOfResources") else "compile_failed", reason

    def _prepares(self, libtype: str) -> bool:
        backend = self._registry.get(libtype)
        return isinstance(backend, Backend) and "prepare" in backend.hooks

    def _started(self) -> ProcessPool:
        self._pool = self._pool or _pool(self._size, None)
        return self._pool

    def stop(self) -> None:
        """End the processes, whatever they do."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()
            pool.join()


_session: Session | None = None
_maker: Maker | None = None
_registry: Registry | None = None


def _pool(size: int, make: Maker | None) -> ProcessPool:
    """Spawned processes: a forked one would inherit a device context, which it may not use."""
    level = logging.getLogger("tunedgemm").getEffectiveLevel()
    context = multiprocessing.get_context("spawn")
    return ProcessPool(max_workers=size, context=context, initializer=_begin, initargs=[make, level])


def _begin(make: Maker | None, level: int) -> None:
    """In the child, before anything else."""
    global _maker
    _maker = make
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    logging.basicConfig(level=level, format="tunedgemm: %(message)s")
    _die_with_parent()


def _die_with_parent() -> None:
    """Have the kernel end this process when its parent ends: a thread here could not, while a call holds the interpreter's lock."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        pipe = parent.sentinel  # nothing is written to it; it closes with the parent, and SIGIO, unhandled, is the end
        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
        if wait([pipe], timeout=0):
            os._exit(1)


def _ask(method: str, arguments: tuple[Any, ...]) -> Any:
    """In the child: one call of its session."""
    global _session
    if _session is None:
        assert _maker is not None, "workers are started with a maker"
        _session = _maker()
    try:
        answer = getattr(_session, method)(*arguments)
        if method == "open":  # what is alive between two shapes stays: collections need not look at it again
            gc.freeze()
        return answer
    except (SystemExit, KeyboardInterrupt):  # a plugin may ask for it; sent back, it would end whoever waits for the answer
        os._exit(1)


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
    except Exception as error:  # a compiler may raise anything
        return f"{type(error).__name__}: {error}"
    return ""


def _death(exitcode: int) -> str:
    """How a process ended, in words."""
    if exitcode < 0:
        try:
            return f"killed by {signal.Signals(-exitcode).name}"
        except ValueError:
            pass
    return f"exit code {exitcode}"
