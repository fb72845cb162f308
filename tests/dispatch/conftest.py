"""What the tests of dispatch share: a child that is forked to serve calls, and a backend for tuners."""

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

PLUGIN = '''
"""The backend `notes`: F.linear, and what NOTES_KIND asks for; the environment of its process goes to the file NOTES."""

import os
import sys
import time
from pathlib import Path

from tunedgemm.plugin import Backend, Solution, hookimpl


@hookimpl
def supports():
    return None


@hookimpl
def enumerate_solutions():
    flags = [name for name in ("HIP_ONLINE_TUNING", "AITER_ONLINE_TUNE", "TUNEDGEMM_ONLINE") if name in os.environ]
    with Path(os.environ["NOTES"]).open("a") as file:
        file.write(f"tuned with {flags}\\n")
    return [Solution("notes", "linear_v1")]


@hookimpl
def run(operands):
    import torch

    if os.environ.get("NOTES_KIND") == "hangs":
        time.sleep(3600)
    return torch.nn.functional.linear(*operands) + (os.environ.get("NOTES_KIND") == "wrong")


backend = Backend("notes", sys.modules[__name__], ops=("a16w16",))
'''


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


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the backend `notes` in this process and its children;
    a file gets a line for each tuned shape."""
    folder = tmp_path / "plugin"
    (folder / "notes-1.dist-info").mkdir(parents=True)
    (folder / "notes-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: notes\nVersion: 1\n")
    (folder / "notes-1.dist-info" / "entry_points.txt").write_text("[tunedgemm.backends]\nnotes = notes_backend:backend\n")
    (folder / "notes_backend.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("NOTES", str(tmp_path / "notes.txt"))
    yield tmp_path / "notes.txt"
    sys.modules.pop("notes_backend", None)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The user folder, which need not be there."""
    return tmp_path / "home"


@pytest.fixture
def descendants(home: Path) -> Callable[[], list[str]]:
    """Return a function that lists the commands of the processes with the test's user folder."""

    def commands() -> list[str]:
        found = []
        for environment in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"TUNEDGEMM_HOME={home}".encode() in environment.read_bytes().split(b"\0"):
                    found.append((environment.parent / "cmdline").read_text())
            except OSError:  # it ended, or is another user's
                continue
        return [command for command in found if command]

    return commands
