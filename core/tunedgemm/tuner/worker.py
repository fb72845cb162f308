"""Worker: the process in which a device's kernels run.

What hangs, faults or dies there costs one call; the process is replaced. It is asked for one thing at a time, so whatever was
asked for is to blame.
"""

from __future__ import annotations

import gc
import os
import threading
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
        with self._lock:
            if self._stopped:
                raise Died("crashed", "stopped")
            self._pool = self._pool or spawned(1, _begin, self._make)
            self._asked = self._pool.schedule(_ask, args=[method, arguments], timeout=timeout or None)
        try:
            return self._asked.result()
        except Overdue:
            raise Died("hung", f"it took more than {timeout:g} s") from None
        except CancelledError:
            raise Died("crashed", "stopped") from None
        except ProcessExpired as error:
            raise Died("crashed", death(error.exitcode)) from None
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


_session: Session | None = None
_maker: Maker | None = None


def _begin(make: Maker) -> None:
    """In the child, before anything else."""
    global _maker
    _maker = make


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
