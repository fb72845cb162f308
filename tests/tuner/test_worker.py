"""Worker: what raises, hangs or dies in a child process costs one call or one candidate, and the process is replaced."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tunedgemm.tuner.trial import DeviceFault
from tunedgemm.tuner.worker import Died, Inline, Worker

SESSION = """
import os, time
from tunedgemm.tuner.trial import DeviceFault
class Fragile:
    calls = 0
    def pid(self): return os.getpid()
    def count(self): self.calls += 1; return self.calls
    def refuse(self): raise ValueError("not with me")
    def fault(self): raise DeviceFault("an illegal address")
    def die(self): os.abort()
    def sleep(self, seconds): time.sleep(seconds); return seconds
"""


@pytest.fixture
def fragile(importable: Path) -> Callable[[], object]:
    """What makes a session that does what it is told, also to its process."""
    (importable / "fragile_session.py").write_text(SESSION)
    import fragile_session  # type: ignore[import-not-found]

    yield fragile_session.Fragile
    del sys.modules["fragile_session"]


@pytest.mark.slow
def test_a_worker_is_replaced_when_it_dies_hangs_or_loses_its_device(fragile: Callable[[], object]) -> None:
    """Each loss says how it came, the next call finds a new process, and what merely raises loses nothing."""
    worker = Worker(fragile)
    first = worker("pid")
    assert first != os.getpid()
    assert [worker("count"), worker("count")] == [1, 2]
    with pytest.raises(ValueError, match="not with me"):
        worker("refuse")
    assert worker("pid") == first

    lost = []
    for method, arguments in (("die", ()), ("sleep", (60,)), ("fault", ())):
        started = time.monotonic()
        with pytest.raises(Died) as error:
            worker(method, *arguments, timeout=3)
        lost.append((error.value.status, str(error.value)))
        assert time.monotonic() - started < 30
        assert worker("count") == 1, "a new process begins anew"

    assert lost == [("crashed", "killed by SIGABRT"), ("hung", "it took more than 3 s"), ("fault", "an illegal address")]
    worker.stop()


@pytest.mark.slow
def test_a_stopped_worker_stays_stopped(fragile: Callable[[], object]) -> None:
    """What is running ends at once, and later calls start nothing."""
    import threading

    worker = Worker(fragile)
    pid = worker("pid")
    timer = threading.Timer(0.5, worker.stop)
    timer.start()
    started = time.monotonic()

    with pytest.raises(Died):
        worker("sleep", 60)
    timer.join()

    assert time.monotonic() - started < 20
    with pytest.raises(Died, match="stopped"):
        worker("pid")
    assert not Path(f"/proc/{pid}").exists()


def test_a_session_in_this_process_answers_like_a_worker() -> None:
    """Registries that cannot travel are tuned here; a lost device is told in the same way."""

    class Here:
        def add(self, one: int, other: int) -> int:
            return one + other

        def fault(self) -> None:
            raise DeviceFault("gone")

    inline = Inline(Here)  # type: ignore[arg-type]

    assert inline("add", 1, 2, timeout=5) == 3
    with pytest.raises(Died, match="gone") as error:
        inline("fault")
    assert error.value.status == "fault"
