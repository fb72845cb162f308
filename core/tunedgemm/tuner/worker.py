"""Worker: the process in which a device's kernels run.

What hangs, faults or dies there costs one call; the process is replaced. It is asked for one thing
at a time, so whatever was asked for is to blame.
"""

from __future__ import annotations

import os
import pickle
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as Overdue
from typing import TYPE_CHECKING, Any

from pebble import ProcessExpired, ProcessPool

from tunedgemm.errors import TunedGemmError
from tunedgemm.tuner.processes import death, spawned
from tunedgemm.tuner.trial import DeviceFault

if TYPE_CHECKING:
    from tunedgemm.tuner.session import Session

#: What a worker process makes its session of.
Maker = Callable[[], "Session"]


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
        for _ in range(2):
            try:
                return _unpacked(*self._begun(method, arguments, timeout).result())
            except Overdue:
                raise Died("hung", f"it took more than {timeout:g} s") from None
            except CancelledError:
                raise Died("crashed", "stopped") from None
            except ProcessExpired as error:
                raise Died("crashed", death(error.exitcode)) from None
            except _Raised as error:
                if isinstance(error.error, DeviceFault):
                    self._drop()
                    raise Died("fault", str(error.error)) from None
                raise error.error from error.__cause__
            except RuntimeError:  # the pool is broken: its process died idle, which is told now and is not this call's fault
                self._drop()
        raise Died("crashed", "its process ends before it can be asked for anything")

    def _begun(self, method: str, arguments: tuple[Any, ...], timeout: float) -> Future[Any]:
        with self._lock:
            if self._stopped:
                raise Died("crashed", "stopped")
            self._pool = self._pool or spawned(1, _begin, self._make)
            self._asked = self._pool.schedule(_ask, args=[method, arguments], timeout=timeout or None)
            return self._asked

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


_session: Session | None = None
_maker: Maker | None = None


def _begin(make: Maker) -> None:
    """In the child, before anything else."""
    global _maker
    _maker = make


def _ask(method: str, arguments: tuple[Any, ...]) -> tuple[bytes, str, str]:
    """In the child: one call of its session.

    Returns:
        What it returned or raised, pickled; where it raised, in words; and from where. Only whoever
        asked unpickles it: a type that is known in this process alone would break the pool, and an
        exception kept by the pool would keep its frames' tensors.
    """
    global _session
    try:
        if _session is None:
            assert _maker is not None, "workers are started with a maker"
            _session = _maker()
        return pickle.dumps(getattr(_session, method)(*arguments)), "", ""
    except (SystemExit, KeyboardInterrupt):  # a plugin may ask for it; sent back, it would end whoever waits for the answer
        os._exit(1)
    except BaseException as error:  # a plugin may raise anything
        return _pickled(error), f"{type(error).__name__}: {error}", traceback.format_exc()


def _pickled(error: BaseException) -> bytes:
    try:
        return pickle.dumps(error)
    except Exception:  # it is told in words then
        return pickle.dumps(None)


class _Raised(Exception):
    """The session raised *error*, there."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def _unpacked(pickled: bytes, raised: str, where: str) -> Any:
    """What `_ask` packed.

    Raises:
        _Raised: the session raised; a RuntimeError stands for what this process cannot rebuild.
    """
    try:
        answer = pickle.loads(pickled)
    except Exception as error:  # its type may not exist here, or not be made of its arguments
        answer, raised = None, raised or f"what came back cannot be read: {type(error).__name__}: {error}"
    if not raised:
        return answer
    rebuilt = answer if isinstance(answer, Exception) else RuntimeError(raised)
    raise _Raised(rebuilt) from RuntimeError(f"in the worker:\n{where}")
