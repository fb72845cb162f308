"""Capture: note every shape a workload meets, tuned or not, with the number of calls; torch-free.

A shape's row is on disk as soon as it is met, so that a process that is killed loses counts of
seconds, never a shape.
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
from tunedgemm.table.folders import untuned_path
from tunedgemm.table.row import key_shape
from tunedgemm.workload.capturefile import Calls, CaptureFile

if TYPE_CHECKING:
    from tunedgemm.ops.op import Op
    from tunedgemm.shape import Shape

_log = logging.getLogger("tunedgemm")

#: Longest wait for others' writing, in seconds, while a model waits. What is not written now is, at the next flush.
_PATIENCE = 2.0

#: The same at the end of a process, after which there is no next flush; of all its captures together.
_LAST_PATIENCE = 20.0

#: Seconds between two looks whether another thread has written a shape meanwhile.
_LOOK = 0.01

#: Seconds between two flushes while a process lives, and the share of one core's time that they may take.
_INTERVAL, _SHARE = 10.0, 0.01

_captures: weakref.WeakSet[Capture] = weakref.WeakSet()


class Capture:
    """The shapes that one process meets, merged into an untuned CSV which other processes and people may write, too.

    Thread-safe. A forked child counts from zero: what its parent had counted is the parent's to
    write.

    Attributes:
        op: the op whose shapes these are.
        path: the untuned CSV: the op's key columns; ``count``, the calls of all processes so far
            that ran at once; and ``graph``, those that were recorded into graphs.
    """

    def __init__(self, op: Op, path: Path | None = None) -> None:
        self.op = op
        self.path = path or untuned_path(op)
        self._counters: dict[Shape, list[int]] = {}
        self._first: dict[Shape, Calls] = {}  # the call with which a shape was met, which its caller counts only after that
        self._written: dict[Shape, Calls] = {}  # of the counters, what the file has
        self._untried: set[Shape] = set()  # those just met
        self._file = CaptureFile(op, self.path)
        self._lock = threading.Lock()  # for what stands above, for moments
        self._writing = threading.RLock()  # for the file, as long as that takes
        self._complained = False
        _captures.add(self)
        _at_exit(self)
        multiprocessing.util.register_after_fork(self, _at_exit)

    def meet(self, shape: Shape, *, recorded: bool = False) -> list[int]:
        """Register a shape and return its counter: the calls that ran at once, and those that were recorded into graphs.

        The caller raises one of the two by one at each call. A shape that is new in this process
        gets its row on disk before this returns, with one call at least. Shapes that differ in
        nothing that a table tells apart share a counter. An empty batch has one, too, but no row.

        Args:
            shape: the shape of a call.
            recorded: whether that call is being recorded.
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
            # Who has waited once in vain does not wait for each further shape.
            self._write(self._enter, 0.0 if self._complained else _PATIENCE, shape)
            self._untried.discard(shape)  # what could not be written is, at the next flush
        return counter

    def flush(self, patience: float = _PATIENCE) -> None:
        """Add to the file what it does not have yet. A failure is logged once and tried again at the next flush.

        Args:
            patience: longest wait for others' writing, in seconds.
        """
        if self._unwritten():
            self._write(self._add, patience)

    def _write(self, write: Callable[[float], None], patience: float, shape: Shape | None = None) -> None:
        """Write alone among this process's threads, unless another has written this shape meanwhile; no failure is raised."""
        end = time.monotonic() + patience
        while not self._writing.acquire(timeout=_LOOK):
            if shape in self._written:
                return
            if time.monotonic() > end:
                self._complain(f"{self.path}: another thread has been writing it for {patience:.0f} s")
                return
        try:
            write(max(0.0, end - time.monotonic()))
            self._complained = False
        except TunedGemmError as error:
            self._complain(str(error))
        except Exception as error:  # a file system may lack locks, and whatever else is wrong is not the model's concern
            self._complain(f"{self.path}: {type(error).__name__}: {error}")
        finally:
            self._writing.release()

    def _complain(self, why: str) -> None:
        if not self._complained:
            self._complained = True
            _log.warning("shapes are not captured for now: %s", why)

    def _enter(self, patience: float) -> None:
        """Put a line for each shape just met into the file; other threads find theirs written."""
        with self._lock:
            fresh = {shape: self._calls(shape) for shape in self._untried if shape not in self._written}
            self._untried.clear()
        if not fresh:
            return
        entered = self._file.enter(fresh, patience)
        if entered is None:
            self._add(patience)
        else:  # a line that another process put there does not tell of this one's calls
            self._written |= {shape: fresh[shape] if shape in entered else (0, 0) for shape in fresh}

    def _add(self, patience: float) -> None:
        """Bring the file's counts up to date, and put all shapes there that it lacks."""
        unwritten = self._unwritten()
        self._file.add(unwritten, patience)
        for shape, (count, graph) in unwritten.items():
            before = self._written.get(shape, (0, 0))
            self._written[shape] = before[0] + count, before[1] + graph

    def _unwritten(self) -> dict[Shape, Calls]:
        """The calls that the file does not have, by shape."""
        unwritten: dict[Shape, Calls] = {}
        for shape in list(self._counters):
            count, graph = self._calls(shape)
            before = self._written.get(shape)
            missing = (max(0, count - before[0]), max(0, graph - before[1])) if before else (count, graph)
            if any(missing) and shape.m > 0:
                unwritten[shape] = missing
        return unwritten

    def _calls(self, shape: Shape) -> Calls:
        """The calls of a shape so far, with the one that its caller is about to count."""
        count, graph = self._counters[shape]
        return (count, graph) if count or graph else self._first.get(shape, (0, 0))

    def _restart(self) -> None:
        """In a forked child: leave the counts so far to the parent, and drop locks that its threads may hold."""
        self._lock, self._writing = threading.Lock(), threading.RLock()
        self._written = {shape: (counter[0], counter[1]) for shape, counter in self._counters.items()}
        self._first.clear()
        self._untried.clear()
        self._file = CaptureFile(self.op, self.path)


@functools.cache
def _recorder(op: Op, path: Path) -> Capture:
    return Capture(op, path)


def recorder(op: Op) -> Capture:
    """This process's capture of an op into the user's untuned file."""
    return _recorder(op, untuned_path(op))


def _at_exit(capture: Capture) -> None:
    """Flush when this process ends; children of multiprocessing end without `atexit` and drop what their parent registered."""
    multiprocessing.util.Finalize(capture, _flush_last, (capture,), exitpriority=0)


_ends: dict[int, float] = {}  # when a process waits for others no longer at its end, by its id


def _flush_last(capture: Capture) -> None:
    """Flush at the end of this process; what others lock for long holds it up once."""
    now = time.monotonic()
    capture.flush(max(0.0, _ends.setdefault(os.getpid(), now + _LAST_PATIENCE) - now))


class _Keeper(threading.Thread):
    """Writes counts while the process lives, for workers of serving engines are killed, or leave without a word."""

    def __init__(self) -> None:
        super().__init__(name="tunedgemm-capture", daemon=True)
        self.over = threading.Event()

    def run(self) -> None:
        """Flush every few seconds, less often where a flush is dear."""
        pause = _INTERVAL
        while not self.over.wait(pause):
            start = time.thread_time()
            for capture in list(_captures):
                capture.flush()
            pause = max(_INTERVAL, (time.thread_time() - start) / _SHARE)


_keepers: dict[int, _Keeper] = {}  # by the id of their process


def _keep_writing() -> None:
    """Start the thread that writes counts, unless this process has one."""
    if os.getpid() in _keepers:
        return
    keeper = _Keeper()
    if _keepers.setdefault(os.getpid(), keeper) is keeper:
        with contextlib.suppress(RuntimeError):  # no thread can be started: counts are written at the end of the process alone
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
