"""Online tuning of shapes without rows: at the first call, or in the background of serving.

The tuner runs in a subprocess, not in a multiprocessing child. A server's worker may be a daemon,
which cannot have multiprocessing children, and its main module may not survive a second import.
The server's environment and signals stay untouched, and one kill ends the tuning at the timeout.

At the first call (`Online`), the call waits. While one process tunes a shape, others that call it
wait until the timeout, and do not tune it themselves. So all ranks continue with the same row or
without any, and a shape that cannot be tuned costs one timeout. The process that tunes waits for no
other, so ranks cannot deadlock.

In the background (`Background`), no call waits. A thread starts the tuner of the counted shapes,
looks at the tables, and has dispatchers bind again what got a row.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from tunedgemm.device import Device, device_of
from tunedgemm.dispatch.cache import LauncherCache
from tunedgemm.dispatch.captures import capture_check, with_call_counter
from tunedgemm.dispatch.settings import MOE, ONLINE, ONLINE_MOE, OWN_ONLINE, Settings
from tunedgemm.errors import TunedGemmError
from tunedgemm.ops import op_named
from tunedgemm.ops.op import Function, Op
from tunedgemm.process.children import import_variables
from tunedgemm.process.filelocks import file_lock
from tunedgemm.process.forksafe import ForkSafeLock
from tunedgemm.shape import Shape
from tunedgemm.table.folders import home_folder, tuned_path
from tunedgemm.table.index import Index
from tunedgemm.table.lookup import Table
from tunedgemm.table.row import key_shape
from tunedgemm.table.sheet import present
from tunedgemm.table.source import open_source

_log = logging.getLogger("tunedgemm")

#: AITER's limits for HIP_ONLINE_TUNING (hipb_mm): the largest M, since prefill meets many Ms once
#: each, and the least free device memory in bytes. AITER_ONLINE_TUNE does not limit M.
MOST_M, FREE_BYTES = 512, 128 << 20
#: Interval in seconds at which the lock of another process is polled.
_POLL = 0.05
#: In the background: seconds between looks at the tables, from a first call to the tuning, and the
#: largest share of a core for reading tables.
_LOOK, _COUNTED, _SHARE = 1.0, 3.0, 0.01
#: Most shapes of one tuner in the background, those with the most calls.
_MOST_SHAPES = 256
#: Exit code of a tuner in the background that another process's tuner keeps from running.
HELD = 75


class Dispatcher(Protocol):
    """The part of `tunedgemm.dispatch.dispatcher.Dispatcher` that online tuning uses."""

    op: Op
    settings: Settings
    cache: LauncherCache
    background: Background | None

    @property
    def table(self) -> Table:
        """Return the merged table."""

    def renew(self) -> None:
        """Read the tables again."""


def attach(dispatcher: Dispatcher) -> tuple[Online | None, Background | None]:
    """Make the online tuning of a dispatcher by its settings: at the call, or in the background."""
    settings = dispatcher.settings
    if not settings.background:
        return Online(dispatcher.op, settings), None
    key = settings.online_seconds, settings.online_libtype
    background = _backgrounds.setdefault(key, Background(*key))
    background.join(dispatcher)
    return None, background


class Online:
    """Online tuning of one op at the first call of a shape, as `Dispatcher.on_miss`.

    Args:
        op: the op; rows go to the user's table of it.
        settings: give the timeout and the libtypes.
    """

    def __init__(self, op: Op, settings: Settings) -> None:
        self._op, self._settings, self._table = op, settings, tuned_path(op)
        self._tried: set[tuple[Shape, Device]] = set()
        self._off = False

    def __call__(self, shape: Shape, device: Device) -> bool:
        """Tune a shape at its first call; return whether the table now has a row for it.

        A failure is logged once and not retried before the next `reload`.
        """
        key = key_shape(shape), device
        if self._off or key in self._tried or not self._wanted(shape, device):
            return False
        has_row, reason = False, ""
        try:
            with self._hold_turn(*key) as first:
                if not (has_row := self._has_row(shape, device)):
                    reason = self._tune_in_child(shape, device) if first else "another process tuned it and has stored no row"
                    has_row = self._has_row(shape, device)
        except TimeoutError:
            reason = f"another process has been tuning it for {self._settings.online_seconds:g} s"
        except (OSError, NotImplementedError) as error:  # no folder for the lock, no locks in its file system, or no more processes
            self._off = True
            _log.warning("online tuning is off in this process: %s; name a folder that can be written with TUNEDGEMM_HOME", error)
            return False
        except TunedGemmError as error:
            reason = str(error)
        if not has_row and key not in self._tried:  # another thread may have said so
            _log.warning("%s was not tuned online, and is served without: %s", shape, reason or "no row of the table answers for it")
        self._tried.add(key)
        return has_row

    def _wanted(self, shape: Shape, device: Device) -> bool:
        """Check whether AITER would tune the shape; synchronises the device.

        Synchronising under the lock could deadlock: a queued collective may wait for a rank that
        waits for the lock.
        """
        if shape.m > MOST_M and not (self._settings.online_moe and shape.op == MOE):
            return False
        if device.index < 0:
            return True
        import torch

        if torch.cuda.mem_get_info(device.index)[0] <= FREE_BYTES:
            return False
        torch.cuda.current_stream(device.index).synchronize()
        return True

    @contextlib.contextmanager
    def _hold_turn(self, shape: Shape, device: Device) -> Iterator[bool]:
        """Hold the file lock of a shape on a kind of device; yield whether it was free.

        Raises:
            TimeoutError: another process held it until the timeout.
            OSError, NotImplementedError: the file system has no such lock.
        """
        path = self._table.with_name(f"{self._table.name}.online-{_digest(device, shape.to_dict())}.lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        lock, first = file_lock(path), True
        try:
            lock.acquire(timeout=0)
        except TimeoutError:
            first = False
            _log.info("%s is being tuned by another process: waiting for at most %g s", shape, self._settings.online_seconds)
            lock.acquire(timeout=self._settings.online_seconds, poll_interval=_POLL)
        try:
            yield first
        finally:
            with contextlib.suppress(OSError):
                path.unlink()  # while held: a process that opened it earlier only waits, and does not tune
            lock.release()

    def _has_row(self, shape: Shape, device: Device) -> bool:
        """Check whether the table file has a row for a shape.

        Raises:
            TableError: the file cannot be read.
        """
        if not present(self._table):
            return False
        return Table(self._op, index=Index([[open_source(self._table, self._op)]])).has_row(shape, device)

    def _tune_in_child(self, shape: Shape, device: Device) -> str:
        """Tune in a subprocess until the timeout; return the reason if it failed, "" if unknown."""
        started, seconds = time.monotonic(), self._settings.online_seconds
        _log.info("%s is tuned now, for at most %g s", shape, seconds)
        code, reason = _run_tuner({shape: 1}, device, seconds, self._settings.online_libtype)
        if code is None:
            return f"it took more than {seconds:g} s; TUNEDGEMM_ONLINE_SECONDS allows more, TUNEDGEMM_ONLINE_LIBTYPE tries less"
        _log.info("%s: the tuner took %.1f s", shape, time.monotonic() - started)
        return reason


class Background:
    """Online tuning in the background, of all dispatchers of a process with these settings.

    One thread per process, which starts with the first shape without a row. A forked child only
    reads rows.

    Args:
        seconds: seconds of all tuning.
        libtype: the ``--libtype`` of the tuner.
    """

    def __init__(self, seconds: float, libtype: str) -> None:
        self._left, self._libtype = seconds, libtype
        self._waiting: dict[tuple[Shape, Device], list[int]] = {}  # numbers of calls, eager and recorded
        self._since = 0.0  # time.monotonic of the first of them
        self._again = 0.0  # time.monotonic of the next look at the tables
        self._begun: set[tuple[Shape, Device]] = set()
        self._served: weakref.WeakKeyDictionary[Dispatcher, _Stamp] = weakref.WeakKeyDictionary()
        self._lock = ForkSafeLock()
        self._thread: threading.Thread | None = None

    def join(self, dispatcher: Dispatcher) -> None:
        """Follow the table of a dispatcher until it is reloaded or freed."""
        with self._lock:
            self._served[dispatcher] = _stamp(tuned_path(dispatcher.op))

    def with_count(self, launcher: Function, dispatcher: Dispatcher, shape: Shape, operands: tuple[Any, ...]) -> Function:
        """Wrap a launcher to count its calls while its shape waits to be tuned."""
        device = device_of(operands[0].get_device())
        if not shape.m or dispatcher.table.has_row(shape, device):
            return launcher
        key = key_shape(shape), device
        with self._lock:
            self._start()
            if self._left <= 0 or key in self._begun:
                return launcher
            if not self._waiting:
                self._since = time.monotonic()
            counter = self._waiting.setdefault(key, [0, 0])
        return with_call_counter(launcher, counter, capture_check(operands[0]), len(operands))

    def _start(self) -> None:
        """Start the thread of this process; the caller holds the lock."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tunedgemm-online", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread can be started: calls are served untuned
                self._thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(_LOOK)
            with self._lock:
                if not self._dispatchers:
                    self._thread = None
                    return
            try:
                self._look()
                for device, calls in self._due().items():
                    self._tune(device, calls)
            except Exception as error:  # serving goes on
                self._end(f"{type(error).__name__}: {error}")

    @property
    def _dispatchers(self) -> list[Dispatcher]:
        with self._lock:
            return [dispatcher for dispatcher in list(self._served) if dispatcher.background is self]

    def _look(self) -> None:
        """Renew the dispatchers whose table has changed, within the share of a core."""
        if time.monotonic() < self._again:
            return
        started = time.thread_time()
        for dispatcher in self._dispatchers:
            try:
                stamp = _stamp(tuned_path(dispatcher.op))
                if stamp != self._served.get(dispatcher):
                    self._served[dispatcher] = stamp
                    dispatcher.renew()
            except TunedGemmError as error:  # the table of before serves
                _log.warning("rows tuned online are not read: %s", error)
        self._again = time.monotonic() + (time.thread_time() - started) / _SHARE

    def _due(self) -> dict[Device, dict[Shape, int]]:
        """Return the shapes that have been counted, with their calls, by device; they count no more."""
        with self._lock:
            if not self._waiting or time.monotonic() < self._since + _COUNTED:
                return {}
            waiting, self._waiting = self._waiting, {}
            self._begun |= waiting.keys()
        shapes = {shape for shape, _ in waiting}
        for dispatcher in self._dispatchers:
            dispatcher.cache.drop(lambda served: key_shape(served.shape) in shapes)
        due: dict[Device, dict[Shape, int]] = {}
        for (shape, device), counter in waiting.items():
            due.setdefault(device, {})[shape] = max(1, sum(counter))
        return due

    def _tune(self, device: Device, calls: Mapping[Shape, int]) -> None:
        """Tune shapes in a child, and look for its rows meanwhile."""
        if self._left <= 0:
            return
        started = time.monotonic()

        def goes_on() -> bool:
            self._look()
            return bool(self._dispatchers)

        most = dict(sorted(calls.items(), key=lambda item: -item[1])[:_MOST_SHAPES])
        code, said = _run_tuner(most, device, self._left, self._libtype, goes_on)
        self._left -= time.monotonic() - started
        if code == HELD:  # this process only reads then
            self._left = 0.0
            _log.info("another process tunes online")
        elif code:
            self._end(said if said and code > 0 else f"the tuner ended with exit code {code}")
        else:
            _log.info("online tuning: %s; %.0f s are left", said or "the seconds are over", max(0.0, self._left))

    def _end(self, reason: str) -> None:
        """Tune no more in this process, and say why."""
        self._left = 0.0
        _log.warning("online tuning has ended in this process: %s", reason)

    def _restart(self) -> None:
        """Only read rows in a forked child, if its parent may tune."""
        if self._thread is not None:
            self._thread, self._left = None, 0.0
            self._start()


_backgrounds: dict[tuple[float, str], Background] = {}


def _restart_all() -> None:
    for background in _backgrounds.values():
        background._restart()


os.register_at_fork(after_in_child=_restart_all)

#: Inode, size and time of a file; None for an absent one.
_Stamp = tuple[int, int, int] | None


def _stamp(path: Path) -> _Stamp:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _run_tuner(
    calls: Mapping[Shape, int], device: Device, seconds: float, libtype: str, goes_on: Callable[[], bool] | None = None
) -> tuple[int | None, str]:
    """Run the tuner in a subprocess; return its exit code, None if it was killed, and its last line.

    Args:
        calls: the shapes, with their calls.
        device: the device to tune on.
        seconds: seconds until it is killed.
        libtype: ``--libtype``.
        goes_on: in the background: whether to continue, asked once a second.
    """
    question: str | None = json.dumps({
        "shapes": [[shape.to_dict(), count] for shape, count in calls.items()],
        "tables": {op: str(tuned_path(op_named(op))) for op in dict.fromkeys(shape.op for shape in calls)},
        "seconds": seconds, "libtype": libtype, "device": str(device.index) if device.index >= 0 else "cpu",
        "kind": [device.gfx, device.cu_num, device.name], "parent": os.getpid(), "held": HELD,
        "lock": str(home_folder() / f"online-{_digest(device)}.lock") if goes_on else "",
    })  # fmt: skip
    deadline = time.monotonic() + seconds
    with subprocess.Popen(
        [sys.executable, "-c", "from tunedgemm.tuner.online import child; child()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env=_environment(device), text=True, errors="replace", start_new_session=True,
    ) as process:  # fmt: skip
        try:
            while (left := deadline - time.monotonic()) > 0 and (goes_on is None or goes_on()):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    printed, errors = process.communicate(question, timeout=min(left, _LOOK))
                    break
                question = None  # sent
            else:
                return None, ""
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
    lines = (errors if process.returncode else printed).split("\n")
    return process.returncode, next((line.strip() for line in reversed(lines) if line.strip()), "")


def _digest(device: Device, *more: object) -> str:
    """Digest a kind of device and more, as a part of the name of a lock."""
    identity = json.dumps([*more, device.gfx, device.cu_num, device.name], sort_keys=True)
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def _environment(device: Device) -> dict[str, str]:
    """Return the subprocess's environment: same import paths and device, online tuning off."""
    kept = {name: text for name, text in os.environ.items() if name not in (OWN_ONLINE, ONLINE, ONLINE_MOE)}
    # Rows of a CPU hold for this number of threads; MKL's variable overrides OpenMP's.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(device.cu_num)) if device.kind == "cpu" else {}
    return {**kept, **import_variables(), **threads}
