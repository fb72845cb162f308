"""Capture: record every shape that a workload calls, with call counts. Torch-free.

A shape is written to disk at its first call, so a killed process loses seconds of counts but no
shape.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import multiprocessing.util
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tunedgemm.errors import TunedGemmError
from tunedgemm.process.forksafe import ForkSafeLock
from tunedgemm.table.folders import untuned_path
from tunedgemm.table.row import key_shape
from tunedgemm.workload.capturefile import Calls, CaptureFile

if TYPE_CHECKING:
    from tunedgemm.ops.op import Op
    from tunedgemm.shape import Shape

_log = logging.getLogger("tunedgemm")

#: Lock timeout in seconds while a model waits; the next flush writes the rest.
_PATIENCE = 2.0

#: Shutdown grace period in seconds for the final flush of all captures.
_LAST_PATIENCE = 20.0

#: Seconds after the last write until the replaced file is checked for late lines of other writers.
_LATE = 0.02

#: Poll interval in seconds while another thread may write the shape.
_LOOK = 0.01

#: Flush interval in seconds, and largest fraction of a core that flushing may use.
_INTERVAL, _SHARE = 10.0, 0.01

_captures: weakref.WeakSet[Capture] = weakref.WeakSet()


class Capture:
    """Captured shapes of this process, merged into an untuned CSV shared with other processes.

    Thread-safe. A forked child counts from zero, since its parent writes the earlier counts.

    Attributes:
        op: the op of the shapes.
        path: the untuned CSV: the op's key columns, ``count`` (eager calls of all processes) and
            ``graph`` (calls recorded into graphs).
    """

    def __init__(self, op: Op, path: Path | None = None) -> None:
        self.op = op
        self.path = path or untuned_path(op)
        self._counters: dict[Shape, list[int]] = {}
        self._first: dict[Shape, Calls] = {}  # the first call of a shape, which its caller counts only after `register`
        self._written: dict[Shape, Calls] = {}  # the part of the counters that the file has
        self._untried: set[Shape] = set()  # shapes not yet written
        self._file = CaptureFile(op, self.path)
        self._lock = ForkSafeLock()  # guards the fields above, briefly
        self._writing = ForkSafeLock()  # guards the file, for as long as a write takes
        self._complained = False
        _captures.add(self)
        _at_exit(self)
        multiprocessing.util.register_after_fork(self, _at_exit)

    def register(self, shape: Shape, *, recorded: bool = False) -> list[int]:
        """Register a shape and return its counter: [eager calls, calls recorded into graphs].

        The caller increments one of them per call. A new shape is written to disk before this
        returns, with at least one call. Shapes with equal table keys share a counter. An empty
        batch is counted but not written.

        Args:
            shape: the shape of a call.
            recorded: whether the call is recorded into a graph.
        """
        shape = key_shape(shape)
        counter = self._counters.get(shape)
        if counter is None:
            with self._lock:
                if shape not in self._counters and shape.m > 0:
                    self._first[shape] = (0, 1) if recorded else (1, 0)
                    self._untried.add(shape)
                counter = self._counters.setdefault(shape, [0, 0])
            _keep_writing()
        if shape in self._untried:
            # After a timeout, do not wait for further shapes.
            self._write(self._enter, 0.0 if self._complained else _PATIENCE, shape)
            self._untried.discard(shape)  # the next flush writes what failed now
        return counter

    def flush(self, patience: float = _PATIENCE) -> None:
        """Add new counts to the file; log a failure once, and retry at the next flush.

        Args:
            patience: lock timeout in seconds.
        """
        if self._unwritten():
            self._write(self._add, patience)
        elif self._file.may_have_late_lines:
            self._write(self._file.move_late_lines, patience)

    @property
    def has_replaced_file(self) -> bool:
        """Check whether others may still append to a file that this process has replaced."""
        return self._file.may_have_late_lines

    def _write(self, write: Callable[[float], None], patience: float, shape: Shape | None = None) -> None:
        """Write under the file lock unless another thread wrote the shape; never raises."""
        end = time.monotonic() + patience
        while not self._writing.acquire(timeout=_LOOK):
            if shape in self._written:
                return
            if time.monotonic() > end:
                self._log_failure(f"{self.path}: another thread has been writing this file for {patience:.0f} s")
                return
        try:
            write(max(0.0, end - time.monotonic()))
            self._complained = False
        except TunedGemmError as error:
            self._log_failure(str(error))
        except Exception as error:  # a file system may lack locks, and no failure here may stop the model
            self._log_failure(f"{self.path}: {type(error).__name__}: {error}")
        finally:
            self._writing.release()

    def _log_failure(self, why: str) -> None:
        if not self._complained:
            self._complained = True
            _log.warning("shapes are not captured for now: %s", why)

    def _enter(self, patience: float) -> None:
        """Append lines for all new shapes, also those of other threads."""
        with self._lock:
            fresh = {shape: self._calls(shape) for shape in self._untried if shape not in self._written}
            self._untried.clear()
        if not fresh:
            return
        entered = self._file.enter(fresh, patience)
        if entered is None:
            self._add(patience)
        else:  # a line from another process does not include this one's calls
            self._written |= {shape: fresh[shape] if shape in entered else (0, 0) for shape in fresh}

    def _add(self, patience: float) -> None:
        """Update the file's counts, and append all shapes that it lacks."""
        unwritten = self._unwritten()
        self._file.add(unwritten, patience)
        for shape, (count, graph) in unwritten.items():
            before = self._written.get(shape, (0, 0))
            self._written[shape] = before[0] + count, before[1] + graph

    def _unwritten(self) -> dict[Shape, Calls]:
        """Return the calls missing in the file, by shape."""
        unwritten: dict[Shape, Calls] = {}
        for shape in list(self._counters):
            count, graph = self._calls(shape)
            before = self._written.get(shape)
            missing = (max(0, count - before[0]), max(0, graph - before[1])) if before else (count, graph)
            if any(missing) and shape.m > 0:
                unwritten[shape] = missing
        return unwritten

    def _calls(self, shape: Shape) -> Calls:
        """Return the calls of a shape, including a first one that is not counted yet."""
        count, graph = self._counters[shape]
        return (count, graph) if count or graph else self._first.get(shape, (0, 0))

    def _restart(self) -> None:
        """Reset a forked child, whose earlier counts the parent writes."""
        self._written = {shape: (counter[0], counter[1]) for shape, counter in self._counters.items()}
        self._first.clear()
        self._untried.clear()
        self._file = CaptureFile(self.op, self.path)


@functools.cache
def _recorder(op: Op, path: Path) -> Capture:
    return Capture(op, path)


def recorder(op: Op) -> Capture:
    """Return this process's capture of an op into the user's untuned file."""
    return _recorder(op, untuned_path(op))


def _at_exit(capture: Capture) -> None:
    """Flush when this process ends, also as a multiprocessing child, which skips `atexit`."""
    multiprocessing.util.Finalize(capture, _flush_last, (capture,), exitpriority=0)


_ends: dict[int, float] = {}  # process id -> when its exit stops waiting for other writers


def _flush_last(capture: Capture) -> None:
    """Flush at exit, within the shutdown grace period."""
    end = _ends.setdefault(os.getpid(), time.monotonic() + _LAST_PATIENCE)
    capture.flush(max(0.0, end - time.monotonic()))
    if capture.has_replaced_file:
        time.sleep(_LATE)
        capture.flush(max(0.0, end - time.monotonic()))


class _Keeper(threading.Thread):
    """Thread that flushes counts regularly, since workers of engines are often killed."""

    def __init__(self) -> None:
        super().__init__(name="tunedgemm-capture", daemon=True)
        self.over = threading.Event()

    def run(self) -> None:
        """Flush at the interval, less often if flushes are slow."""
        pause = _INTERVAL
        while not self.over.wait(pause):
            start = time.thread_time()
            for capture in list(_captures):
                capture.flush()
            pause = max(_INTERVAL, (time.thread_time() - start) / _SHARE)


_keepers: dict[int, _Keeper] = {}  # by process id


def _keep_writing() -> None:
    """Start the flushing thread of this process."""
    if os.getpid() in _keepers:
        return
    keeper = _Keeper()
    if _keepers.setdefault(os.getpid(), keeper) is keeper:
        with contextlib.suppress(RuntimeError):  # no thread can be started: counts are written at exit alone
            keeper.start()


def _end() -> None:
    for keeper in _keepers.values():
        keeper.over.set()
    for capture in list(_captures):
        _flush_last(capture)


def _restart_all() -> None:
    for capture in list(_captures):
        capture._restart()
    if _keepers:
        _keepers.clear()
        _keep_writing()


atexit.register(_end)
os.register_at_fork(after_in_child=_restart_all)
