"""Join and leave a Ray cluster: a named one, a running one, or one started and ended here."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tunedgemm.plugin import UserError
from tunedgemm.tools.files import read_regular

_log = logging.getLogger("tunedgemm")

#: Seconds to reach the head of a cluster, and then to join; Ray itself keeps trying for minutes.
_REACH_S, _JOIN_S = 5.0, 60.0
#: Bytes of the object store of a Ray that starts here: events are small.
_STORE_BYTES = 128 * 2**20
_JOIN = "import ray, sys; ray.init(address=sys.argv[1], logging_level='ERROR', log_to_driver=False)"
_FORM = "pass HOST:PORT of the head node (default port: 6379), auto or local"


@contextlib.contextmanager
def connect(address: str) -> Iterator[None]:
    """Connect to a cluster as a driver; keep an existing connection.

    Args:
        address: HOST:PORT, ``auto``, ``local``, or "". The empty one means RAY_ADDRESS, else the
            cluster that `ray start` began on this machine. Without either, a cluster of this
            machine alone lasts as long as the context.

    Raises:
        UserError: Ray is not installed, or the cluster cannot be joined within seconds.
    """
    try:
        import ray
    except ImportError as error:
        raise UserError(f"--executor ray needs Ray, which cannot be imported ({error}): pip install 'tunedgemm[ray]'") from error
    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS", "") or _latest()
    if address not in ("auto", "local"):
        _join_in_child(address)
    loud = _log.isEnabledFor(logging.INFO)
    quiet: dict[str, Any] = {"log_to_driver": loud, "logging_level": logging.INFO if loud else logging.ERROR}
    if address == "local":
        quiet |= {"include_dashboard": False, "object_store_memory": _STORE_BYTES}
    with _silence_raylets(loud):
        with _keep_signal_handlers(), _environment():
            try:
                ray.init(address=address, **quiet)
            except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
                raise UserError(f"--ray-address {address}: {_last_line(str(error))}") from error
        try:
            yield
        finally:
            ray.shutdown()


def _latest() -> str:
    """Return the address of the cluster that `ray start` last began here, else ``local``.

    A killed head leaves its address behind.
    """
    # the file that ray.init documents for `address`
    file = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
    try:
        address = read_regular(file, 1).decode().strip()
        _reach(address)
    except (OSError, ValueError):
        return "local"
    return address


def _join_in_child(address: str) -> None:
    """Join in a child process, which can be given up.

    Raises:
        UserError: joining fails, or takes too long.
    """
    if "://" in address:
        raise UserError(f"--ray-address {address}: a Ray client cannot stream events; {_FORM}, and run the tuner on a node of it")
    try:
        _reach(address)
    except ValueError:
        raise UserError(f"--ray-address {address}: {_FORM}") from None
    except OSError as error:
        raise UserError(f"--ray-address {address}: no server answers there ({error}); {_FORM}") from error
    try:
        done = subprocess.run([sys.executable, "-c", _JOIN, address], capture_output=True, text=True, check=False, timeout=_JOIN_S)
    except subprocess.TimeoutExpired:
        raise UserError(f"--ray-address {address}: the server there is not the head of a Ray cluster; {_FORM}") from None
    if done.returncode:
        raise UserError(f"--ray-address {address}: {_last_line(done.stderr) or f'exit code {done.returncode}'}")


def _reach(address: str) -> None:
    """Connect to HOST:PORT.

    Raises:
        ValueError: the address has another form.
        OSError: no server listens there.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or len(port) > 5 or int(port) > 65535:
        raise ValueError(address)
    socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()


def _last_line(text: str) -> str:
    """Return the last line, where Python puts the error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:500] if lines else ""


@contextlib.contextmanager
def _silence_raylets(loud: bool) -> Iterator[None]:
    """Keep the raylets' log off standard output.

    Ray prints it even with log_to_driver off, and has no public switch for it.
    """
    module: Any = importlib.import_module("ray._private.worker")
    before = getattr(module, "_worker_logs_enabled", True)
    module._worker_logs_enabled = loud
    try:
        yield
    finally:
        module._worker_logs_enabled = before


@contextlib.contextmanager
def _keep_signal_handlers() -> Iterator[None]:
    """Keep the tuner's handler of SIGTERM, which Ray replaces."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Set variables of a Ray that starts here, unless the user has set them."""
    ours = {
        "RAY_USAGE_STATS_ENABLED": "0",  # no usage reports
        "RAY_worker_niceness": "0",  # with Ray's 15, timed processes wait for all others
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # actors without GPUs leave CUDA_VISIBLE_DEVICES alone; unset, Ray warns about it
    }
    fresh = {name: value for name, value in ours.items() if name not in os.environ}
    os.environ.update(fresh)
    try:
        yield
    finally:
        for name in fresh:
            os.environ.pop(name, None)
