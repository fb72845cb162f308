"""Test in a child process whether a library loads, since loading may crash or hang.

Results are cached by the library's files, their times, torch's version and the interpreter: a
success until one of these changes, a failure for an hour.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO, TypeVar

from tunedgemm.backends.artifact import read_cached, write_cached
from tunedgemm.process.children import signal_name
from tunedgemm.process.forksafe import ForkSafeLock

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")

#: Time limit of a load in seconds, including the interpreter's start and torch's import.
LOAD_SECONDS = 60.0
#: Seconds for which a failure is cached, since a missing dependency may be installed later.
_RETRY_SECONDS = 3600.0
#: Exit codes for success and for an exception; unusual ones, because a library may call exit.
_LOADED, _RAISED = 91, 92
#: Precedes the exception on standard error, which has warnings of the library, too.
_MARK = "its code raised "
#: The search path is this process's; a crash leaves no core file; the child ends with the thread
#: that waits for it (PR_SET_PDEATHSIG), as a killed process could not end it.
_CHILD = """import sys
sys.path[:] = {path!r}
import ctypes, os, resource
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
ctypes.CDLL(None).prctl(1, 9)
try:
    exec({code!r}, {{"__name__": "__main__"}})
    status = {loaded}
except BaseException as error:
    status = {raised}
    causes = [error, *filter(None, [error.__cause__])]
    texts = [f"{{type(each).__name__}}: {{each}}" for each in causes]
    print("{mark}" + ", from ".join(texts), file=sys.stderr, flush=True)
os._exit(status)
"""
_LONGEST_TEXT = 400
_POLL_SECONDS = 0.02
_known: dict[str, str] = {}
_asking: dict[str, ForkSafeLock] = {}


class _Thread(threading.local):
    """State of a thread: an event that is set once nothing waits for its answers."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()


_thread = _Thread()


def in_threads(function: Callable[[_Item], _Answer], items: Sequence[_Item]) -> list[_Answer]:
    """Map a function over items in threads, which may call `load_fault` concurrently.

    If the caller is interrupted, their child processes are killed.
    """
    cancelled = threading.Event()
    with ThreadPoolExecutor(len(items), initializer=lambda: setattr(_thread, "cancelled", cancelled)) as pool:
        try:
            answers = [pool.submit(function, item) for item in items]
            while wait(answers, timeout=_POLL_SECONDS).not_done:  # without a limit, a signal just before the wait would be missed
                pass
            return [answer.result() for answer in answers]
        except BaseException:
            cancelled.set()
            raise


def load_fault(code: str, *files: Path, timeout: float = LOAD_SECONDS) -> str:
    """Return why a library does not load here; "" if it does.

    The first call for a library starts a child process; later ones use the cache.

    Args:
        code: Python source that loads the library, such as
            ``import sys, torch; torch.ops.load_library(sys.argv[1])``.
        files: the files that decide whether it loads; the code finds them in ``sys.argv[1:]``.
        timeout: seconds until the child is killed, which counts as a failure.

    Raises:
        KeyboardInterrupt: the process was interrupted meanwhile; the child has been killed.
    """
    try:
        key = _key(code, files)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    if key not in _known:
        with _asking.setdefault(key, ForkSafeLock()):  # questions about other libraries do not wait
            if key not in _known:
                _known[key] = _remembered(key, code, files, timeout)
    return _known[key]


def _key(code: str, files: Sequence[Path]) -> str:
    """Return a text that changes when the answer may change.

    Raises:
        OSError: a file is missing.
    """
    status = [(str(file), file.stat()) for file in files]
    stamps = [(name, each.st_mtime_ns, each.st_size, each.st_ino) for name, each in status]
    search = [os.environ.get(name, "") for name in ("LD_LIBRARY_PATH", "LD_PRELOAD")]
    return json.dumps([code, stamps, sys.executable, sys.version, _torch_version(), search])


@functools.cache
def _torch_version() -> str:
    return importlib.metadata.version("torch")


def _remembered(key: str, code: str, files: Sequence[Path], timeout: float) -> str:
    """Return the cache's answer, else the child's, which the cache then remembers."""
    name = hashlib.sha256(key.encode()).hexdigest()
    place = f"{name[:2]}/{name}"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        kept = json.loads(read_cached(place))
        fault, until = str(kept["fault"]), float(kept["until"])
        if not fault or time.time() < until <= time.time() + _RETRY_SECONDS:
            return fault
    if _thread.cancelled.is_set():  # a plugin's caller may have caught the first interrupt
        raise KeyboardInterrupt
    fault = _fault_in_child(code, files, timeout)
    with contextlib.suppress(OSError):  # the next process asks again
        write_cached(place, [json.dumps({"fault": fault, "until": time.time() + _RETRY_SECONDS}).encode()])
    return fault


def _fault_in_child(code: str, files: Sequence[Path], timeout: float) -> str:
    path = [folder for folder in sys.path if folder]
    source = _CHILD.format(path=path, code=code, loaded=_LOADED, raised=_RAISED, mark=_MARK)
    # A file, because a pipe stays open while a process that the library started lives.
    with tempfile.TemporaryFile() as errors:
        try:
            child = subprocess.Popen(
                [sys.executable, "-c", source, *map(str, files)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
        except OSError as error:
            return f"no process to load it in: {error}"
        end = time.monotonic() + timeout
        try:
            while (status := child.poll()) is None:
                if time.monotonic() > end:
                    return f"it does not load within {timeout:g} s"
                if _thread.cancelled.wait(_POLL_SECONDS):
                    raise KeyboardInterrupt
        finally:
            if child.returncode is None:
                os.killpg(child.pid, signal.SIGKILL)  # also processes that the library started
                child.wait()
        return "" if status == _LOADED else _described(status, errors)


def _described(status: int, errors: IO[bytes]) -> str:
    """Return the exception of a child that did not load the library, or how the child ended."""
    errors.seek(0)
    text = errors.read().decode(errors="replace")
    if status == _RAISED:
        return " ".join(text.rpartition(_MARK)[2].split())[:_LONGEST_TEXT]
    last = (text.strip().splitlines() or [""])[-1][:_LONGEST_TEXT]
    ending = f"ends the process by {name}" if (name := signal_name(status)) else f"ends the process with status {status}"
    return f"loading it {ending}" + (f": {last}" if last else "")
