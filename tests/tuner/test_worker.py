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
import os, sys, threading, time, types
from tunedgemm.tuner.trial import DeviceFault
class Two(Exception):
    def __init__(self, one, other): super().__init__(f"{one} and {other}")
class Fragile:
    calls = 0
    def pid(self): return os.getpid()
    def count(self): self.calls += 1; return self.calls
    def refuse(self): raise ValueError("not with me")
    def fault(self): raise DeviceFault("an illegal address")
    def die(self): os.abort()
    def sleep(self, seconds): time.sleep(seconds); return seconds
    def two_arguments(self): raise Two(1, 2)
    def of_no_module(self):
        sys.modules["made_here"] = made = types.ModuleType("made_here")
        made.Odd = type("Odd", (Exception,), {"__module__": "made_here"})
        raise made.Odd("odd")
    def unknown_answer(self):
        try: self.of_no_module()
        except Exception as error: return error
    def leave(self): raise GeneratorExit("bye")
    def overdue(self): raise TimeoutError("of its own")
    def die_later(self): threading.Timer(0.2, lambda: os._exit(3)).start(); return os.getpid()
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
def test_what_cannot_be_rebuilt_here_is_told_in_words(fragile: Callable[[], object]) -> None:
    """A plugin's exception that this process cannot unpickle, or that is none to it, costs its call and not the process."""
    worker = Worker(fragile)
    first = worker("pid")

    for method, said in (("two_arguments", "Two: 1 and 2"), ("of_no_module", "Odd: odd"), ("leave", "GeneratorExit: bye")):
        with pytest.raises(RuntimeError, match=said):
            worker(method, timeout=20)
    with pytest.raises(RuntimeError, match="cannot be read: ModuleNotFoundError"):
        worker("unknown_answer", timeout=20)
    with pytest.raises(TimeoutError, match="of its own"):
        worker("overdue", timeout=20)
    assert worker("pid") == first
    worker.stop()


@pytest.mark.slow
def test_a_worker_that_dies_idle_is_nobodys_fault(fragile: Callable[[], object]) -> None:
    """Killed between two calls, say for memory, it is replaced, and the next call is answered."""
    worker = Worker(fragile)
    pid = worker("die_later")
    limit = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < limit:
        time.sleep(0.05)
    time.sleep(0.5)

    assert worker("count", timeout=20) == 1
    assert worker("count", timeout=20) == 2
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
