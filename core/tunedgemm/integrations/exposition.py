"""Expose the counters to Prometheus and OpenTelemetry by their client libraries. Torch-free.

An engine's calls are counted in its workers, and its API server answers ``/metrics``. So every
process writes its counters to a value file of prometheus_client's multiprocess mode. Where
``PROMETHEUS_MULTIPROC_DIR`` is set, the client's own collector sums the files of its folder. Else
they go to ``TUNEDGEMM_METRICS_DIR``, which the first process makes and its children inherit, and a
collector in the default registry sums them.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from tunedgemm.dispatch.counters import COUNTERS, metrics
from tunedgemm.process.forksafe import ForkSafeLock
from tunedgemm.process.variables import switched_on
from tunedgemm.text.printable import logger

_log = logger("tunedgemm")

#: The variables that switch the counters on, and that name the folder of value files without
#: the client's multiprocess mode; and the client's variable of that mode.
VARIABLE, FOLDER, MULTIPROCESS = "TUNEDGEMM_METRICS", "TUNEDGEMM_METRICS_DIR", "PROMETHEUS_MULTIPROC_DIR"
#: Seconds between two writes, and the largest share of a core that they take.
_INTERVAL, _SHARE = 5.0, 0.001
#: Size of a value file, enough for the shapes that are counted singly.
_BYTES = 1 << 18

_lock = ForkSafeLock()


@functools.cache
def expose_counters() -> None:
    """Expose the counters if ``TUNEDGEMM_METRICS`` is on; an absent or failing library is passed over."""
    if not switched_on(VARIABLE):
        return
    for library, start in (("prometheus_client", _start_prometheus), ("opentelemetry.metrics", _start_opentelemetry)):
        try:
            start(importlib.import_module(library))
        except ImportError:
            continue
        except Exception as error:  # counters must stop no program
            _log.warning("counters: %s does not show them (got %s); update it, or unset %s", library, error, VARIABLE)


def _start_prometheus(client: ModuleType) -> None:
    if not os.environ.get(MULTIPROCESS):
        _set_folder()
        client.REGISTRY.register(_Collector())
    _start_writing()
    atexit.register(write)
    os.register_at_fork(after_in_child=_start_writing)


def _set_folder() -> None:
    """Make the folder of value files, for this process and its later children, unless it is named."""
    if os.environ.get(FOLDER):
        return
    made, owner = tempfile.mkdtemp(prefix="tunedgemm-metrics-"), os.getpid()
    os.environ[FOLDER] = made
    atexit.register(lambda: shutil.rmtree(made, ignore_errors=True) if os.getpid() == owner else None)


def _start_writing() -> None:
    threading.Thread(target=_keep_writing, name="tunedgemm counters", daemon=True).start()


def _keep_writing() -> None:
    pause = _INTERVAL
    while True:
        time.sleep(pause)
        start = time.thread_time()
        write()
        pause = max(_INTERVAL, (time.thread_time() - start) / _SHARE)


def write() -> None:
    """Write the counters of this process to its value file; a full or removed folder is passed over."""
    folder = os.environ.get(MULTIPROCESS) or os.environ.get(FOLDER)
    if not folder:
        return
    try:
        with _lock:
            values = _value_file(Path(folder) / f"counter_tunedgemm{os.getpid()}.db")
            for key, number in _samples():
                values.write_value(key, number, time.time())
    except Exception as error:  # a damaged file raises anything
        _log.debug("counters: cannot be written (got %s)", error)


@functools.lru_cache(maxsize=1)
def _value_file(path: Path) -> Any:
    """Open the value file of this process; a forked child has another path.

    Its blocks are allocated first: a write into a mapped hole ends the process if the disk is full.
    """
    from prometheus_client.mmap_dict import MmapedDict

    if not path.exists():
        made = path.with_suffix(".new")  # collectors read no file of this name
        try:
            with made.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, _BYTES)
            made.rename(path)
        except OSError:
            made.unlink(missing_ok=True)
            raise
    return MmapedDict(str(path))


def _samples() -> Iterator[tuple[str, float]]:
    from prometheus_client.mmap_dict import mmap_key

    for name, values in metrics().items():
        labels, meaning = COUNTERS[name]
        for place, number in values.items():
            yield mmap_key(f"tunedgemm_{name}", f"tunedgemm_{name}_total", list(labels), list(place), meaning), number


class _Collector:
    """Collector of the value files of this process and its children."""

    def describe(self) -> list[Any]:
        """Return no metrics, so that registering reads no file."""
        return []

    def collect(self) -> Iterable[Any]:
        """Return the sums; none in multiprocess mode, whose own collector reads the files."""
        from prometheus_client.multiprocess import MultiProcessCollector

        folder = os.environ.get(FOLDER)
        if os.environ.get(MULTIPROCESS) or not folder:
            return []
        write()
        try:
            return MultiProcessCollector.merge([str(path) for path in Path(folder).glob("counter_tunedgemm*.db")])  # type: ignore[no-any-return]
        except Exception as error:  # a file that is damaged, or gone meanwhile, must not stop the page's other metrics
            _log.debug("counters: cannot be read (got %s)", error)
            return []


def _start_opentelemetry(api: ModuleType) -> None:
    """Create observable counters; the API drops them where the process configures no provider."""

    def observer(name: str) -> Callable[[Any], Iterator[Any]]:
        labels = COUNTERS[name][0]

        def observe(_: Any) -> Iterator[Any]:
            for place, number in metrics()[name].items():
                yield api.Observation(number, dict(zip(labels, place, strict=True)))

        return observe

    meter = api.get_meter("tunedgemm")
    for name, (_, meaning) in COUNTERS.items():
        meter.create_observable_counter(f"tunedgemm.{name}", callbacks=[observer(name)], description=meaning)
