"""Online tuning: tune a shape without a row at its first call, once per machine, then serve it.

The tuner runs in a subprocess, not in a multiprocessing child. A server's worker may be a daemon,
which cannot have multiprocessing children, and its main module may not survive a second import.
The server's environment and signals stay untouched, and one kill ends the tuning at the timeout.

While one process tunes a shape, others that call it wait until the timeout, and do not tune it
themselves. So all ranks continue with the same row or without any, and a shape that cannot be
tuned costs one timeout. The process that tunes waits for no other, so ranks cannot deadlock.
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
import time
from collections.abc import Iterator
from pathlib import Path

from tunedgemm.device import Device
from tunedgemm.dispatch.settings import MOE, ONLINE, ONLINE_MOE, Settings
from tunedgemm.errors import TunedGemmError
from tunedgemm.ops.op import Op
from tunedgemm.process.filelocks import file_lock
from tunedgemm.shape import Shape
from tunedgemm.table.folders import tuned_path
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


class Online:
    """Online tuning of one op, as `Dispatcher.on_miss`.

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
        identity = json.dumps([shape.to_dict(), device.gfx, device.cu_num, device.name], sort_keys=True)
        digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
        path = self._table.with_name(f"{self._table.name}.online-{digest}.lock")
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
        table = Table(self._op, index=Index([[open_source(self._table, self._op)]]))
        return next(table.candidates(shape, device), None) is not None

    def _tune_in_child(self, shape: Shape, device: Device) -> str:
        """Tune in a subprocess until the timeout; return the reason if it failed, "" if unknown."""
        started, seconds = time.monotonic(), self._settings.online_seconds
        question = {
            "shape": shape.to_dict(), "table": str(self._table), "seconds": seconds, "libtype": self._settings.online_libtype,
            "device": str(device.index) if device.index >= 0 else "cpu",
        }  # fmt: skip
        command = [sys.executable, "-c", "from tunedgemm.tuner.online import child; child()", json.dumps(question)]
        _log.info("%s is tuned now, for at most %g s", shape, seconds)
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=_environment(device),
            text=True, errors="replace", start_new_session=True,
        ) as process:  # fmt: skip
            try:
                printed, errors = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                return f"it took more than {seconds:g} s; TUNEDGEMM_ONLINE_SECONDS allows more, TUNEDGEMM_ONLINE_LIBTYPE tries less"
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
        _log.info("%s: the tuner took %.1f s", shape, time.monotonic() - started)
        reasons = printed.split("\n") if not process.returncode else errors.split("\n")
        return next((line.strip() for line in reversed(reasons) if line.strip()), "")


def _environment(device: Device) -> dict[str, str]:
    """Return the subprocess's environment: same import paths and device, online tuning off."""
    kept = {name: text for name, text in os.environ.items() if name not in (ONLINE, ONLINE_MOE)}
    path = os.pathsep.join(folder or str(Path.cwd()) for folder in sys.path)
    # Rows of a CPU hold for this number of threads; MKL's variable overrides OpenMP's.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(device.cu_num)) if device.kind == "cpu" else {}
    return {**kept, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", **threads}
