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
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from pebble import ProcessPool

#: Exit code of a child whose plugin ends it with code 0.
EXITED = 120


def spawned_pool(size: int, begin: Callable[..., None] | None = None, *arguments: Any) -> ProcessPool:
    """Return a pool of processes that are replaced when they die; *begin* runs first in each.

    They are spawned: a forked one would inherit a device context, which is unusable there.
    """
    level = logging.getLogger("tunedgemm").getEffectiveLevel()
    context = multiprocessing.get_context("spawn")
    return ProcessPool(max_workers=size, context=context, initializer=_begin, initargs=[level, begin, arguments])


def _begin(level: int, begin: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    """Prepare the child before anything else."""
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
