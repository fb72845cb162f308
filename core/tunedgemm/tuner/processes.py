"""Process pools whose children may crash, ignore Ctrl-C and die with their parent; SIGTERM."""

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
from tunedgemm.process.children import signal_name

#: Exit code of a child whose plugin calls exit with code 0.
EXITED = 120
#: Variables of serving processes, which a kernel that calls another op would follow.
_OF_SERVING = ("AITER_TUNE_GEMM", "AITER_ONLINE_TUNE", "HIP_ONLINE_TUNING", "TUNEDGEMM_ONLINE")

#: Extra processes that may end before one has started, beyond the size of the pool.
_MORE_STARTS = 2
#: Start-up timeout of a process in seconds, in which it imports the main script.
_START_S = 300.0


class NeverBegan(UserError):
    """Child processes end or hang at start-up; names the main script that they import."""


class SpawnedPool(ProcessPool):
    """A pool of processes that are replaced when they die, unless none has ever started.

    They are spawned, since a forked process cannot use the parent's device context. Each first
    imports the main script of this process, which may fail.

    Args:
        size: number of processes.
        begin: initialiser, called with *arguments* in each process.
    """

    def __init__(self, size: int, begin: Callable[..., None] | None = None, *arguments: Any) -> None:
        level = logging.getLogger("tunedgemm").getEffectiveLevel()
        self._starts = _Starts(size + _MORE_STARTS)
        initargs = [self._starts.begun, level, begin, arguments]
        super().__init__(max_workers=size, context=self._starts, initializer=_begin, initargs=initargs)

    @property
    def active(self) -> bool:
        """Check that the pool works, and that its processes started in time."""
        return bool(super().active) and not self._starts.is_overdue()

    @property
    def has_begun(self) -> bool:
        """Check whether a process has started."""
        return self._starts.begun.is_set()

    def check_begun(self) -> None:
        """Check that a broken pool had started a process.

        Raises:
            NeverBegan: no process ever started.
        """
        if not self.has_begun:
            raise NeverBegan(self._starts.fault())


class _Starts(SpawnContext):
    """Starts the processes of a pool; only a limited number before the first succeeds.

    Attributes:
        begun: set by the first process that starts.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most, self._since, self._children = most, time.monotonic(), list[SpawnProcess]()
        self.begun = self.Event()

    def Process(self, *arguments: Any, **named: Any) -> SpawnProcess:  # type: ignore[override]
        """Make a process.

        Raises:
            OSError: too many ended at start-up, so the pool breaks.
        """
        if not self.begun.is_set():
            if len(self._children) >= self._most:
                raise OSError(self.fault())
            self._children.append(SpawnProcess(*arguments, **named))
            return self._children[-1]
        return SpawnProcess(*arguments, **named)

    def is_overdue(self) -> bool:
        """Check whether no process has started in time."""
        return not self.begun.is_set() and time.monotonic() - self._since > _START_S

    def fault(self) -> str:
        """Describe how the processes ended, with the remedy."""
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
    """Initialise the child: signals, exit codes, then *begin*."""
    begun.set()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    logging.basicConfig(level=level, format="tunedgemm: %(message)s")
    for name in _OF_SERVING:
        os.environ.pop(name, None)
    _die_with_parent()
    leave = os._exit
    # pebble detects the loss at once only for exit codes other than 0.
    os._exit = lambda code: leave(code or EXITED)  # type: ignore[assignment]
    if begin is not None:
        begin(*arguments)


def _die_with_parent() -> None:
    """Make the operating system kill this process with its parent.

    A thread could not do it while a call holds the GIL.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        pipe = parent.sentinel  # closes with the parent, which raises SIGIO, unhandled
        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
        if wait([pipe], timeout=0):
            os._exit(1)


class Terminated(KeyboardInterrupt):
    """SIGTERM, handled like Ctrl-C."""


@contextlib.contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C within the context, in the main thread; ignore a second one.

    coreutils' ``timeout`` sends two, to the process and to its group. The second, raised during
    clean-up, would leave locks held.

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
    """Return the CPU seconds (utime and stime of proc(5)) of a process; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def exit_reason(exitcode: int) -> str:
    """Describe an exit code."""
    if exitcode == EXITED:
        return "it called os._exit(0)"
    name = signal_name(exitcode)
    return f"killed by {name}" if name else f"exit code {exitcode}"
