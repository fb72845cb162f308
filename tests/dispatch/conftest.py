"""What the tests of dispatch share: a child that is forked to serve calls."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable, Iterator

import pytest

#: Seconds after which a child counts as hung; it must do in milliseconds what it does.
HUNG = 10


def in_child(work: Callable[[], object]) -> str:
    """Fork a child; return how it ended: served, wrong (*work* returned False), raised or hung."""
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
