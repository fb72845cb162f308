"""Capture: every shape on disk when it is met, counts that add up over threads and processes, never an error in the model."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest
from tunedgemm.capture import Capture, recorder
from tunedgemm.csvfile import read_untuned
from tunedgemm.folders import untuned_path
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.sheet import locked

# Forking is what these tests are about; the parent may have threads of libraries.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")

OP = op_named("a16w16")
SOURCE = """
import os, sys, time
from pathlib import Path
from tunedgemm.capture import Capture
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
capture = Capture(op_named("a16w16"), Path({path!r}))
def call(m, times=1):
    counter = capture.meet(Shape("a16w16", m, 64, 64))
    for _ in range(times):
        counter[0] += 1
"""


@pytest.fixture(autouse=True)
def at_leisure(monkeypatch):
    """The thread that writes counts leaves the tests alone."""
    monkeypatch.setattr("tunedgemm.capture._INTERVAL", 3600.0)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "bf16_untuned_gemm.csv"


def shape(m: int, **more: object) -> Shape:
    return Shape("a16w16", m, 64, 64, **more)


def call(capture: Capture, m: int, times: int = 1) -> None:
    counter = capture.meet(shape(m))
    for _ in range(times):
        counter[0] += 1


def counts(path) -> dict[int, int]:
    return {entry.shape.m: entry.count for entry in read_untuned(path, OP)}


def both(path) -> dict[int, tuple[int, int]]:
    return {entry.shape.m: (entry.count, entry.graph) for entry in read_untuned(path, OP)}


def test_a_shape_is_on_disk_when_it_is_met(path):
    """A shape's row is there at once, in AITER's columns and a count; calls after it are added by a flush."""
    capture = Capture(OP, path)
    counter = capture.meet(shape(3, outdtype="fp32", epilogue="bias"))
    assert path.read_text().splitlines() == [
        "M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,count,graph",
        "3,64,64,True,torch.bfloat16,torch.float32,False,False,1,0",
    ]
    counter[0] += 7
    capture.flush()
    capture.flush()
    assert counts(path) == {3: 7}


def test_meeting_again_gives_the_same_counter(path):
    """A shape has one counter in a process; the bias's dtype, which no table tells apart, makes no other."""
    capture = Capture(OP, path)
    counter = capture.meet(shape(3, epilogue="bias"))
    assert capture.meet(shape(3, epilogue="bias", bias_dtype="fp32")) is counter
    assert capture.meet(shape(3)) is not counter
    assert len(read_untuned(path, OP)) == 2


def test_an_empty_batch_is_not_captured(path):
    """There is nothing to tune for M = 0: such a call gets a counter and no row."""
    capture = Capture(OP, path)
    call(capture, 0, 5)
    capture.flush()
    assert not path.exists()


def test_layouts_and_scales_are_kept(path):
    """Shapes that AITER's columns cannot tell apart stay apart, in columns after them."""
    shapes = [shape(1), shape(1, layout="ck-n64"), shape(1, layout="aiter16x16"), shape(1, dtype="fp8_e4m3fn", scale="row")]
    for met in shapes:
        Capture(OP, path).meet(met)
    assert [entry.shape for entry in read_untuned(path, OP)] == shapes
    assert path.read_text().startswith("M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,count,graph,layout")


def test_rows_of_others_are_kept(path):
    """Rows written by AITER or by hand stay, understood or not; a row without a count stands for one call."""
    path.parent.mkdir()
    path.write_text("K,N,M,note\n64,64,5,mine\n64,64,6,also\n64,64,x,odd\n")
    capture = Capture(OP, path)
    call(capture, 5, 3)
    call(capture, 7, 2)
    capture.flush()
    assert path.read_text().splitlines() == [
        "K,N,M,note,bias,dtype,outdtype,scaleAB,bpreshuffle,count,graph",
        "64,64,5,mine,,,,,,4,",
        "64,64,6,also,,,,,,,",
        "64,64,x,odd,,,,,,,",
        "64,64,7,,False,torch.bfloat16,torch.bfloat16,False,False,2,0",
    ]


def test_two_captures_of_one_file_add_up(path):
    """What another process has written is read again and added to, not overwritten."""
    one, two = Capture(OP, path), Capture(OP, path)
    call(one, 1, 10)
    call(two, 1, 20)
    call(two, 2, 5)
    one.flush()
    two.flush()
    assert counts(path) == {1: 30, 2: 5}


def test_a_file_that_vanishes_is_made_again(path):
    """When somebody deletes the file, what is met from then on is captured."""
    capture = Capture(OP, path)
    call(capture, 1, 4)
    capture.flush()
    path.unlink()
    call(capture, 1, 2)
    call(capture, 2)
    assert counts(path) == {1: 2, 2: 1}


def test_threads_add_up(path):
    """Threads that meet the same shapes lose neither shapes nor calls."""
    capture = Capture(OP, path)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=lambda: [call(capture, m, 50) for m in range(1, 6) for _ in range(40)]) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    capture.flush()
    assert counts(path) == dict.fromkeys(range(1, 6), 6 * 40 * 50)


def _child(capture: Capture, own: int) -> None:
    call(capture, 1, 100)
    call(capture, own, 10)


def test_forked_children_count_only_their_own(path):
    """Children of multiprocessing add their own calls when they end; what the parent had counted is written once."""
    capture = Capture(OP, path)
    call(capture, 1, 1000)  # of these one is written when the children start
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_child, args=(capture, own)) for own in (2, 3, 3)]
    for child in children:
        child.start()
    call(capture, 1, 500)
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0, 0]
    capture.flush()
    assert counts(path) == {1: 1800, 2: 10, 3: 20}


def test_processes_add_up(path, child):
    """Separate processes, forks among them, that end in an ordinary way leave the exact sum."""
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


@pytest.mark.parametrize("end", ["os._exit(0)", f"os.kill(os.getpid(), {int(signal.SIGKILL)})"])
def test_a_killed_process_loses_no_shape(path, child, end):
    """A process that ends without a word, a forked child too, leaves every shape it met."""
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
    capture.meet(shape(1))
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


def test_failures_are_logged_once_and_retried(path, caplog):
    """Where nothing can be written the model goes on; once it can, everything counted since is written."""
    path.parent.write_text("a file where the folder should be")
    capture = Capture(OP, path)
    with caplog.at_level(logging.WARNING, "tunedgemm"):
        call(capture, 1, 10)
        call(capture, 2, 20)
        capture.flush()
    assert len(caplog.messages) == 1
    assert "cannot be written" in caplog.text
    path.parent.unlink()
    call(capture, 3, 30)
    capture.flush()
    assert counts(path) == {1: 10, 2: 20, 3: 30}


def test_a_file_that_stays_locked_holds_a_model_up_once(path, caplog, monkeypatch):
    """Another process that hangs with the lock costs one wait, not one for each new shape; what was met is written after it."""
    monkeypatch.setattr("tunedgemm.capture._PATIENCE", 0.5)
    capture = Capture(OP, path)
    with locked(path), caplog.at_level(logging.WARNING, "tunedgemm"):
        start = time.monotonic()
        for m in range(1, 21):
            call(capture, m, 2)
        assert time.monotonic() - start < 5
    assert len(caplog.messages) == 1 and "has kept" in caplog.text
    capture.flush()
    assert counts(path) == dict.fromkeys(range(1, 21), 2)


def test_a_full_disk_is_survived(path, child):
    """A disk that fills up costs a line in the log; nothing is counted twice, and all is written once there is room."""
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


def test_a_file_that_is_no_csv_is_left_alone(path, caplog):
    """A file that cannot be read is not overwritten; the log says what is wrong with it."""
    path.parent.mkdir()
    path.write_bytes(b"\x00\x01")
    call(Capture(OP, path), 1)
    assert path.read_bytes() == b"\x00\x01"
    assert "is no text" in caplog.text


def test_the_recorder_of_an_op():
    """An op has one recorder in a process, which writes the user's untuned file."""
    capture = recorder(OP)
    assert capture is recorder(OP)
    assert capture.path == untuned_path(OP)
    capture.meet(shape(9))
    assert counts(untuned_path(OP)) == {9: 1}


def test_meeting_a_known_shape_writes_nothing(path):
    """Only the first meeting of a shape touches the file."""
    capture = Capture(OP, path)
    call(capture, 1)
    path.unlink()
    for _ in range(100):
        call(capture, 1)
    assert capture.meet(shape(1)) == [101, 0]
    assert not path.exists()


def test_calls_of_two_kinds_are_counted_apart(path):
    """What was recorded into a graph is no call that ran; a shape first met so has a row that says so at once."""
    capture = Capture(OP, path)
    first, second = capture.meet(shape(1), recorded=True), capture.meet(shape(2))
    assert both(path) == {1: (0, 1), 2: (1, 0)}
    first[1] += 3
    second[0] += 1
    second[1] += 2
    capture.flush()
    capture.flush()
    assert both(path) == {1: (0, 3), 2: (1, 2)}


@pytest.mark.parametrize("fork", ["True", "os.fork() == 0"])
def test_counts_of_a_killed_process_are_there_but_for_the_last_seconds(path, child, fork):
    """A thread of each process writes counts while it lives, of a forked child, too."""
    source = SOURCE.format(path=str(path)).replace("import os,", "import tunedgemm.capture; tunedgemm.capture._INTERVAL = 0.05\nimport os,")
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


def test_the_thread_that_writes_is_one_and_does_not_hold_a_process_up(child, path):
    """One for all captures of a process, none before a shape is met; a process ends without waiting for it."""
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


def _spawned(path, own: int) -> None:
    _child(Capture(OP, path), own)


def test_spawned_children_add_up(path):
    """Children that start afresh write what they counted when they end."""
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=_spawned, args=(path, own)) for own in (2, 3)]
    for process in children:
        process.start()
    for process in children:
        process.join()
    assert [process.exitcode for process in children] == [0, 0]
    assert counts(path) == {1: 200, 2: 10, 3: 10}


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
@pytest.mark.parametrize(("shapes", "own"), [(5000, False), (40_000, True)], ids=["the same", "their own"])
def test_many_processes_and_threads_meet_many_shapes(path, shapes, own):
    """8 processes of 4 threads: every shape has one line, and the count is exact; each process its own 5,000, or all the same."""
    children = []
    for number in range(8):
        first, last = (1 + number * 5000, 1 + (number + 1) * 5000) if own else (1, 5001)
        source = SOURCE.format(path=str(path)) + MANY.format(first=first, last=last, step=4 if own else 1, shift=int(own))
        children.append(subprocess.Popen([sys.executable, "-c", source], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}))
    assert [process.wait(timeout=400) for process in children] == [0] * 8

    assert counts(path) == dict.fromkeys(range(1, shapes + 1), 2 if own else 8 * 4 * 2)
    assert len(path.read_text().splitlines()) == shapes + 1
