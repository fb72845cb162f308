"""What the tests of dispatch share: a child that is forked to serve calls."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

#: Seconds after which a child counts as hung; it must do in milliseconds what it does.
HUNG = 10
#: Numbers of the system's threads that outlived a wait for ended ones: those of libraries.
_lasting: set[int] = set()


def await_ended_threads() -> None:
    """Wait until threads that have ended in Python have ended in the system, too.

    MKL frees the memory of an ending thread under a lock. A child that is forked then would wait
    for it forever in its first product.
    """
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        known = _lasting | {thread.native_id for thread in threading.enumerate()}
        if not (ended := {int(path.name) for path in Path("/proc/self/task").iterdir()} - known):
            return
        time.sleep(0.001)
    _lasting.update(ended)


def in_child(work: Callable[[], object]) -> str:
    """Fork a child; return how it ended: served, wrong (*work* returned False), raised or hung."""
    await_ended_threads()
    pid = os.fork()
    if not pid:
        try:
            faulthandler.dump_traceback_later(HUNG, exit=True)  # says where, and exits with 1
            code = 0 if work() else 3
        except BaseException:
            code = 4
        finally:
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}"
    return {0: "served", 1: "hung", 3: "wrong", 4: "raised"}.get(os.WEXITSTATUS(status), "left")


@pytest.fixture(name="in_child")
def _in_child() -> Callable[[Callable[[], object]], str]:
    return in_child


@pytest.fixture
def hasty_switches() -> Iterator[None]:
    """Let threads take turns a thousand times as often, as a free-threaded interpreter would."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)
