"""Child processes that may die, ignore Ctrl-C and end with their parent; and the tuner's own
SIGTERM.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from pebble import ProcessPool

from tunedgemm.errors import UserError

#: Exit code of a child whose plugin ends it with code 0.
EXITED = 120


#: Processes of a pool that may end before one begins, beyond the first of each place in it.
_MORE_STARTS = 2
#: Seconds until a process must have begun: it imports the main script, and what that imports.
_START_S = 300.0


class NeverBegan(UserError):
    """The child processes end, or hang, before they begin; names the script that they import."""


class SpawnedPool(ProcessPool):
    """A pool of processes that are replaced when they die, unless none has ever begun.

    They are spawned: a forked one would inherit a device context, which is unusable there. Each
    imports the main script of this process first, which may end it.

    Args:
        size: the number of processes.
        begin: runs first in each, with the *arguments*.
    """

    def __init__(self, size: int, begin: Callable[..., None] | None = None, *arguments: Any) -> None:
        level = logging.getLogger("tunedgemm").getEffectiveLevel()
        self._starts = _Starts(size + _MORE_STARTS)
        initargs = [self._starts.begun, level, begin, arguments]
        super().__init__(max_workers=size, context=self._starts, initializer=_begin, initargs=initargs)

    @property
    def active(self) -> bool:
        """Return whether the pool works; one whose processes take too long to begin does not."""
        return bool(super().active) and not self._starts.is_overdue()

    @property
    def has_begun(self) -> bool:
        """Return whether a process has begun."""
        return self._starts.begun.is_set()

    def check_begun(self) -> None:
        """Check that a process of a pool that broke has begun.

        Raises:
            NeverBegan: none has.
        """
        if not self.has_begun:
            raise NeverBegan(self._starts.fault())


class _Starts(SpawnContext):
    """Starts the processes of one pool, up to a bound until one has begun.

    Attributes:
        begun: is set by the first process that begins.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most, self._since, self._children = most, time.monotonic(), list[SpawnProcess]()
        self.begun = self.Event()

    def Process(self, *arguments: Any, **named: Any) -> SpawnProcess:  # type: ignore[override]
        """Make a process.

        Raises:
            OSError: too many have ended before they began; the pool breaks.
        """
        if not self.begun.is_set():
            if len(self._children) >= self._most:
                raise OSError(self.fault())
            self._children.append(SpawnProcess(*arguments, **named))
            return self._children[-1]
        return SpawnProcess(*arguments, **named)

    def is_overdue(self) -> bool:
        """Return whether no process has begun in time."""
        return not self.begun.is_set() and time.monotonic() - self._since > _START_S

    def fault(self) -> str:
        """Return how the processes ended, and the remedy."""
        ended = [child.exitcode for child in self._children if child.pid is not None and child.exitcode is not None]
        is_killed = bool(ended) and ended[-1] < 0 and not self.is_overdue()
        if self.is_overdue():
            found = f"no end in {_START_S:g} s"
        elif ended:
            found = f"{exit_reason(ended[-1])}, {len(ended)} times"
        else:
            found = "a start of processes in it"
        script = getattr(sys.modules["__main__"], "__file__", None)
        if script and not is_killed:
            guard = 'put all that it runs under `if __name__ == "__main__":`'
            return f"{script}: its import in a child process does not reach its end (got {found}); {guard}"
        return f"child processes: end before they begin (got {found}); free memory and processes of this machine"


def _begin(begun: Event, level: int, begin: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    """Prepare the child before anything else."""
    begun.set()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    logging.basicConfig(level=level, format="tunedgemm: %(message)s")
    _die_with_parent()
    leave = os._exit
    # After exit code 0 pebble waits for the deadline: other codes show the loss at once.
    os._exit = lambda code: leave(code or EXITED)  # type: ignore[assignment]
    if begin is not None:
        begin(*arguments)


def _die_with_parent() -> None:
    """Make the kernel end this process with its parent.

    A thread could not, while a call holds the interpreter's lock.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        pipe = parent.sentinel  # nothing is written to it; it closes with the parent, and SIGIO, unhandled, is the end
        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
        if wait([pipe], timeout=0):
            os._exit(1)


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived: the run ends as after Ctrl-C."""


@contextlib.contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the context as Ctrl-C does, in the main thread; a second one has no effect.

    coreutils' ``timeout`` sends two at once, to the process and to its group. Raised during the
    exit, the second would leave locks unreleased.

    Raises:
        Terminated: SIGTERM arrived.
    """

    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated("SIGTERM")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def cpu_seconds(pid: int | None) -> float:
    """Return the processor seconds that a process has used, 0 if it is gone.

    They are utime and stime of proc(5), in clock ticks.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def exit_reason(exitcode: int) -> str:
    """Return how a process ended, as text."""
    if exitcode == EXITED:
        return "it called os._exit(0)"
    if exitcode < 0:
        try:
            return f"killed by {signal.Signals(-exitcode).name}"
        except ValueError:
            pass
    return f"exit code {exitcode}"
