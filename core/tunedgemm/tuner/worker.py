"""Worker: the child process that runs a device's kernels.

A hang, fault or crash costs one request, and the process is replaced. Requests run one at a time,
so the current one is to blame.
"""

from __future__ import annotations

import os
import pickle
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, CancelledError, Future
from concurrent.futures import TimeoutError as Overdue
from typing import TYPE_CHECKING, Any, Protocol

from pebble import ProcessExpired

from tunedgemm.errors import TunedGemmError
from tunedgemm.process.plugin_guard import described
from tunedgemm.tuner.processes import SpawnedPool, exit_reason
from tunedgemm.tuner.trial import DeviceFault, Request

if TYPE_CHECKING:
    from tunedgemm.tuner.session import Session

#: Factory of the session in a worker process.
SessionFactory = Callable[[], "Session"]
#: Interval in seconds at which the start of the process is polled.
_LOOK_S = 1.0


class WorkerDied(TunedGemmError):
    """The worker was lost during a request.

    Attributes:
        status: ``hung``, ``crashed`` or ``fault``.
    """

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class AnyWorker(Protocol):
    """A `Worker` or an `Inline`."""

    def __call__(self, request: Request, *, timeout: float = 0.0) -> Any:
        """Run a request on the session and return the answer."""

    def stop(self) -> None:
        """Stop the worker."""


class Inline:
    """A session in this process, for registries and benches that are not picklable."""

    def __init__(self, make_session: SessionFactory) -> None:
        self._session = make_session()

    def __call__(self, request: Request, *, timeout: float = 0.0) -> Any:
        """Run a request; *timeout* has no effect."""
        del timeout
        try:
            return request.run(self._session)
        except DeviceFault as error:
            raise WorkerDied("fault", str(error)) from error

    def stop(self) -> None:
        """Do nothing, since no process was started."""


class Worker:
    """A session in a child process, started at the first request and after a crash."""

    def __init__(self, make_session: SessionFactory) -> None:
        self._make_session = make_session
        self._pool: SpawnedPool | None = None
        self._running: Future[Any] | None = None
        self._stopped = False
        self._lock = threading.Lock()

    def __call__(self, request: Request, *, timeout: float = 0.0) -> Any:
        """Run a request in the child process and return its answer.

        Args:
            request: the request.
            timeout: time limit in seconds once it runs; 0 for none.

        Raises:
            WorkerDied: the process died or was stopped.
            NeverBegan: no process starts.
            Exception: raised by the session.
        """
        for _ in range(2):
            try:
                answer = _unpack(*_result(*self._schedule(request, timeout)))
            except Overdue:
                raise WorkerDied("hung", f"it took more than {timeout:g} s") from None
            except CancelledError:
                raise WorkerDied("crashed", "stopped") from None
            except ProcessExpired as error:
                raise WorkerDied("crashed", exit_reason(error.exitcode)) from None
            except _Raised as error:
                if isinstance(error.error, DeviceFault):
                    self._drop()
                    raise WorkerDied("fault", str(error.error)) from None
                raise error.error from error.__cause__
            except RuntimeError:  # the process died while idle, which does not blame this request
                broken = self._drop()
            else:
                return answer
        if broken is not None:
            broken.check_begun()
        raise WorkerDied("crashed", "its process ends before its first request")

    def _schedule(self, request: Request, timeout: float) -> tuple[SpawnedPool, Future[Any]]:
        with self._lock:
            if self._stopped:
                raise WorkerDied("crashed", "stopped")
            self._pool = self._pool or SpawnedPool(1, _begin, self._make_session)
            self._running = self._pool.schedule(_run, args=[request], timeout=timeout or None)
            return self._pool, self._running

    def stop(self) -> None:
        """Kill the process; later requests raise `WorkerDied`."""
        with self._lock:
            self._stopped = True
            if self._running is not None:
                self._running.cancel()
        self._drop()

    def _drop(self) -> SpawnedPool | None:
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()
            pool.join()
        return pool


def _result(pool: SpawnedPool, future: Future[Any]) -> Any:
    """Wait for a result, also of a broken pool, which may never report.

    Raises:
        BrokenExecutor: the pool broke.
        Exception: raised by the task.
    """
    while True:
        try:
            return future.result(timeout=_LOOK_S)
        except Overdue:
            if future.done():
                return future.result()
            if not pool.active:
                raise BrokenExecutor from None


_session: Session | None = None
_make_session: SessionFactory | None = None


def _begin(make_session: SessionFactory) -> None:
    """Initialise the child with the factory of the session.

    Forks of the child, such as a kernel's, exit at once.
    """
    global _make_session
    _make_session = make_session
    os.register_at_fork(after_in_child=lambda: os._exit(1))


def _run(request: Request) -> tuple[bytes, str, str]:
    """Run a request in the child.

    The answer is pickled here and unpickled by the caller: a type known only to the child would
    break the pool, and an exception kept by the pool would keep the tensors of its frames.

    Returns:
        The pickled answer or exception; the exception as text; its traceback.
    """
    global _session
    try:
        if _session is None:
            assert _make_session is not None, "workers start with a factory"
            _session = _make_session()
        return pickle.dumps(request.run(_session)), "", ""
    except BaseException as error:  # a plugin may raise anything; Ctrl-C does not reach this process
        return _pickle_error(error), described(error), traceback.format_exc()


def _pickle_error(error: BaseException) -> bytes:
    try:
        return pickle.dumps(error)
    except Exception:  # the text replaces it
        return pickle.dumps(None)


class _Raised(Exception):
    """The session raised *error* in the child."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def _unpack(pickled: bytes, raised: str, trace: str) -> Any:
    """Unpickle the answer of `_run`.

    Raises:
        _Raised: the session raised; a RuntimeError replaces an exception that cannot be unpickled.
    """
    try:
        answer = pickle.loads(pickled)
    except Exception as error:  # its type or arguments may not be unpicklable here
        answer, raised = None, raised or f"the answer cannot be read: {type(error).__name__}: {error}"
    if not raised:
        return answer
    rebuilt = answer if isinstance(answer, Exception) else RuntimeError(raised)
    raise _Raised(rebuilt) from RuntimeError(f"in the worker:\n{trace}")
