"""Worker: an exception, a hang or a death in a child process costs one request."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tunedgemm.tuner.trial import DeviceFault
from tunedgemm.tuner.worker import Inline, Worker, WorkerDied

SESSION = """
import os, sys, threading, time, types
from tunedgemm.tuner.trial import DeviceFault
class Two(Exception):
    def __init__(self, one, other): super().__init__(f"{one} and {other}")
class Fragile:
    calls = 0
class Do:
    def __init__(self, name, *arguments): self.name, self.arguments = name, arguments
    def run(self, session): return getattr(self, self.name)(session, *self.arguments)
    def pid(self, session): return os.getpid()
    def count(self, session): session.calls += 1; return session.calls
    def refuse(self, session): raise ValueError("not with me")
    def fault(self, session): raise DeviceFault("an illegal address")
    def die(self, session): os.abort()
    def sleep(self, session, seconds, mark=None):
        if mark: open(mark, "w").close()
        time.sleep(seconds)
    def two_arguments(self, session): raise Two(1, 2)
    def of_no_module(self, session):
        sys.modules["made_here"] = made = types.ModuleType("made_here")
        made.Odd = type("Odd", (Exception,), {"__module__": "made_here"})
        raise made.Odd("odd")
    def unknown_answer(self, session):
        try: self.of_no_module(session)
        except Exception as error: return error
    def leave(self, session): raise GeneratorExit("bye")
    def overdue(self, session): raise TimeoutError("raised by a plugin")
    def die_idle(self, session): threading.Timer(0.2, lambda: os._exit(3)).start(); return os.getpid()
"""


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The session's module, importable here and in the workers.

    Its requests do odd things to their process.
    """
    folder = tmp_path_factory.mktemp("fragile")
    (folder / "fragile_session.py").write_text(SESSION)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, sys.path)]))
        patch.syspath_prepend(str(folder))
        yield importlib.import_module("fragile_session")
    del sys.modules["fragile_session"]


def until(true: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_a_worker_is_replaced_when_it_dies_hangs_or_loses_its_device(fragile: ModuleType, tmp_path: Path) -> None:
    """Each loss has its status, the next request gets a new process, and an exception loses nothing.

    An exception that cannot be unpickled comes back as text. A death between two requests costs
    none. A stop ends the running request, and later requests start nothing.
    """
    worker, do = Worker(fragile.Fragile), fragile.Do
    pid = worker(do("pid"))
    assert pid != os.getpid()
    assert [worker(do("count")), worker(do("count"))] == [1, 2]
    for name, error, text in (
        ("refuse", ValueError, "not with me"),
        ("two_arguments", RuntimeError, "Two: 1 and 2"),
        ("of_no_module", RuntimeError, "Odd: odd"),
        ("leave", RuntimeError, "GeneratorExit: bye"),
        ("unknown_answer", RuntimeError, "cannot be read: ModuleNotFoundError"),
        ("overdue", TimeoutError, "raised by a plugin"),
    ):
        with pytest.raises(error, match=text):
            worker(do(name), timeout=60)
    assert worker(do("pid")) == pid

    lost = []
    for name, arguments, timeout in (("die", (), 60), ("sleep", (600,), 1), ("fault", (), 60)):
        with pytest.raises(WorkerDied) as death:
            worker(do(name, *arguments), timeout=timeout)
        lost.append((death.value.status, str(death.value)))
        assert worker(do("count")) == 1, "a new process begins anew"
    assert lost == [("crashed", "killed by SIGABRT"), ("hung", "it took more than 1 s"), ("fault", "an illegal address")]

    pid = worker(do("die_idle"))
    until(lambda: not Path(f"/proc/{pid}").exists())
    assert [worker(do("count"), timeout=60), worker(do("count"), timeout=60)] == [1, 2]

    pid, mark = worker(do("pid")), tmp_path / "sleeps"
    stopper = threading.Thread(target=lambda: (until(mark.exists), worker.stop()))
    stopper.start()
    with pytest.raises(WorkerDied):
        worker(do("sleep", 600, mark))
    stopper.join()
    with pytest.raises(WorkerDied, match="stopped"):
        worker(do("pid"))
    assert not Path(f"/proc/{pid}").exists()


def test_a_session_in_this_process_answers_like_a_worker() -> None:
    """A request runs on the session of this process, and a lost device is a `WorkerDied` there,
    too.
    """

    class Add:
        def run(self, session: int) -> int:
            return session + 1

    class Fault:
        def run(self, session: int) -> int:
            raise DeviceFault("gone")

    inline = Inline(lambda: 2)  # type: ignore[arg-type,return-value]

    assert inline(Add(), timeout=5) == 3  # type: ignore[arg-type]
    with pytest.raises(WorkerDied, match="gone") as death:
        inline(Fault())  # type: ignore[arg-type]
    assert death.value.status == "fault"
