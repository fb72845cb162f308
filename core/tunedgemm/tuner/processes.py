"""Processes that may die: spawned, quiet about Ctrl-C, and gone with their parent; and how the tuner's own is stopped."""

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


def spawned_pool(size: int, begin: Callable[..., None] | None = None, *arguments: Any) -> ProcessPool:
    """A pool of processes that are replaced when they die; *begin* is called first in each.

    They are spawned: a forked one would inherit a device context, which it may not use.
    """
    level = logging.getLogger("tunedgemm").getEffectiveLevel()
    context = multiprocessing.get_context("spawn")
    return ProcessPool(max_workers=size, context=context, initializer=_begin, initargs=[level, begin, arguments])


def _begin(level: int, begin: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    """In the child, before anything else."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    logging.basicConfig(level=level, format="tunedgemm: %(message)s")
    _die_with_parent()
    if begin is not None:
        begin(*arguments)


def _die_with_parent() -> None:
    """Have the kernel end this process when its parent ends: a thread here could not, while a call holds the interpreter's lock."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        pipe = parent.sentinel  # nothing is written to it; it closes with the parent, and SIGIO, unhandled, is the end
        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
        if wait([pipe], timeout=0):
            os._exit(1)


class Terminated(KeyboardInterrupt):
    """SIGTERM came: the run ends as after Ctrl-C."""


@contextlib.contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end what is inside as Ctrl-C does, where this is the main thread; a second one changes nothing.

    coreutils' ``timeout`` sends two at once, to the process and to its group: raised while the
    first is on its way out, the second would break the locks that are being let go.

    Raises:
        Terminated: it came.
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
    """Processor seconds that a process has used so far; 0 where it is gone (proc(5): utime and stime, in clock ticks)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def exit_reason(exitcode: int) -> str:
    """How a process ended, in words."""
    if exitcode < 0:
        try:
            return f"killed by {signal.Signals(-exitcode).name}"
        except ValueError:
            pass
    return f"exit code {exitcode}"
