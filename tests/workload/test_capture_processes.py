"""Capture over the life of processes: forked, spawned, killed, held up by others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.table.untuned import read_untuned
from tunedgemm.workload.capture import Capture

# Forking is what these tests are about; the parent may have threads of libraries.
pytestmark = [pytest.mark.usefixtures("no_writer"), pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")]

OP = op_named("a16w16")
SOURCE = """
import os, sys, time
from pathlib import Path
from tunedgemm.workload.capture import Capture
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
capture = Capture(op_named("a16w16"), Path({path!r}))
def call(m, times=1):
    counter = capture.register(Shape("a16w16", m, 64, 64))
    for _ in range(times):
        counter[0] += 1
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "bf16_untuned_gemm.csv"


def call(capture: Capture, m: int, times: int = 1) -> None:
    counter = capture.register(Shape("a16w16", m, 64, 64))
    for _ in range(times):
        counter[0] += 1


def counts(path) -> dict[int, int]:
    return {entry.shape.m: entry.count for entry in read_untuned(path, OP)}


def test_processes_add_up(path, child):
    """Separate and forked processes that end normally leave the exact sum."""
    source = SOURCE.format(path=str(path))
    source += """
call(1, 5)
if os.fork() == 0:
    call(1, 7)
    call(os.getpid() % 2 + 2, 3)
    sys.exit()
call(1, 11)
os.wait()
"""
    workers = [threading.Thread(target=child, args=(source,)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    found = Counter(counts(path))
    assert found[1] == 3 * (5 + 7 + 11)
    assert found[2] + found[3] == 3 * 3


def test_appended_lines_stay(path, child):
    """Lines that others append without a lock, while eight processes flush, are all kept once."""
    stop = path.with_name("stop")
    source = (
        SOURCE.format(path=str(path))
        + f"""
capture.register(Shape("a16w16", os.getpid() % 4 + 1, 64, 64))
while not Path({str(stop)!r}).exists():
    call(os.getpid() % 4 + 1)
    capture.flush()
    time.sleep(0.01)
"""
    )
    workers = [threading.Thread(target=child, args=(source,)) for _ in range(8)]
    for worker in workers:
        worker.start()
    while not path.exists():
        time.sleep(0.01)
    for m in range(1000, 1126):
        with path.open("a") as file:
            file.write(f"{m},64,64,False,torch.bfloat16,torch.bfloat16,False,False,1,0\n")
        time.sleep(0.01)
    stop.touch()
    for worker in workers:
        worker.join()
    kept = Counter(entry.shape.m for entry in read_untuned(path, OP))
    assert [kept[m] for m in range(1000, 1126)] == [1] * 126


@pytest.mark.parametrize("end", ["os._exit(0)", f"os.kill(os.getpid(), {int(signal.SIGKILL)})"])
def test_a_killed_process_loses_no_shape(path, child, end):
    """A process or forked child that is killed leaves every shape it called."""
    source = SOURCE.format(path=str(path))
    source += f"""
call(1, 5)
if os.fork() == 0:
    call(2)
    {end}
os.wait()
call(3)
os._exit(0)
"""
    child(source)
    assert counts(path).keys() == {1, 2, 3}


def test_a_fork_while_a_thread_writes(path):
    """A child forked while a thread of its parent holds the locks is not held up by them."""
    capture = Capture(OP, path)
    call(capture, 1)
    holds, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with capture._writing, capture._lock:
            holds.set()
            go_on.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait(30)
    process = os.fork()
    if process == 0:
        signal.alarm(20)
        call(capture, 2)
        os._exit(0)
    _, status = os.waitpid(process, 0)
    go_on.set()
    thread.join()
    assert status == 0
    assert counts(path) == {1: 1, 2: 1}


def test_a_full_disk_is_survived(path, child):
    """A full disk costs a log line;
    nothing is counted twice, and all counts are written when there is room."""
    source = SOURCE.format(path=str(path))
    source += """
import logging, resource
logging.basicConfig(stream=sys.stdout)
call(1, 10)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (capture.path.stat().st_size + 20, hard))
for m in range(2, 50):
    call(m, 5)
capture.flush()
print(capture.path.read_text().count(chr(10)))
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
call(50, 2)
print(capture.path.read_text().count(chr(10)))
"""
    told, *lines = child(source).splitlines()
    assert told.endswith(f"shapes are not captured for now: {path}: cannot be written: File too large")
    assert lines == ["2", "3"]
    assert counts(path) == {1: 10, **dict.fromkeys(range(2, 50), 5), 50: 2}


@pytest.mark.parametrize("fork", ["True", "os.fork() == 0"])
def test_a_killed_process_loses_only_the_last_seconds_of_counts(path, child, fork):
    """A thread of each process writes counts while it lives, of a forked child, too."""
    source = SOURCE.format(path=str(path)).replace(
        "import os,", "import tunedgemm.workload.capture; tunedgemm.workload.capture._INTERVAL = 0.05\nimport os,"
    )
    source += f"""
call(1, 1)
if {fork}:
    call(1, 41)
    for _ in range(600):
        time.sleep(0.05)
        if ",42," in capture.path.read_text():
            break
    os.kill(os.getpid(), {int(signal.SIGKILL)})
os.wait()
os._exit(0)
"""
    if fork == "True":
        source = f"import os\nif os.fork():\n    os.wait()\n    os._exit(0)\n{source}"
    child(source)
    assert counts(path) == {1: 42}


def test_one_writer_thread_does_not_delay_the_exit(child, path):
    """One thread serves all captures, starts with the first shape, and does not delay the exit."""
    source = SOURCE.format(path=str(path))
    source += """
import threading
before = [thread.name for thread in threading.enumerate()]
for number in range(3):
    capture = Capture(op_named("a16w16"), Path({path!r} + str(number)))
    call(number + 1, 2)
print(before, [(thread.name, thread.daemon) for thread in threading.enumerate()][1:])
""".replace("{path!r}", repr(str(path)))
    assert child(source) == "['MainThread'] [('tunedgemm-capture', True)]"


def test_the_end_of_a_process_waits_once_for_all_its_captures(path, child):
    """Files that others keep locked cost the time to wait for one of them, whatever their number."""
    source = SOURCE.format(path=str(path))
    source += f"""
import multiprocessing.util, tunedgemm.workload.capture
from tunedgemm.table.sheet import locked
tunedgemm.workload.capture._PATIENCE, tunedgemm.workload.capture._LAST_PATIENCE = 0.1, 1.0
captures = [Capture(op_named("a16w16"), Path({str(path)!r} + str(number))) for number in range(5)]
locks = [locked(capture.path) for capture in captures]
for lock, capture in zip(locks, captures):
    capture.register(Shape("a16w16", 1, 64, 64))
    lock.__enter__()
    capture.register(Shape("a16w16", 1, 64, 64))[0] += 5
start = time.monotonic()
tunedgemm.workload.capture._end()
multiprocessing.util._run_finalizers(0)
print(time.monotonic() - start)
"""
    assert float(child(source)) < 3


MANY = """
import sys, threading
sys.setswitchinterval(1e-4)
def work(first):
    for m in range(first, {last}, {step}):
        call(m, 2)
threads = [threading.Thread(target=work, args=({first} + {shift} * number,)) for number in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("shapes", "own"), [pytest.param(1500, False, id="the same"), pytest.param(12_000, True, id="their own", marks=pytest.mark.nightly)]
)
def test_many_processes_and_threads_meet_many_shapes(path, shapes, own):
    """8 processes of 4 threads give every shape one line with an exact count."""
    children = []
    for number in range(8):
        first, last = (1 + number * 1500, 1 + (number + 1) * 1500) if own else (1, 1501)
        source = SOURCE.format(path=str(path)) + MANY.format(first=first, last=last, step=4 if own else 1, shift=int(own))
        children.append(subprocess.Popen([sys.executable, "-c", source], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}))
    assert [process.wait(timeout=400) for process in children] == [0] * 8

    assert counts(path) == dict.fromkeys(range(1, shapes + 1), 2 if own else 8 * 4 * 2)
    assert len(path.read_text().splitlines()) == shapes + 1
