"""Capture: every shape on disk at its first call, exact counts, never an error in the model."""

from __future__ import annotations

import logging
import sys
import threading
import time

import pytest
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.table.folders import untuned_path
from tunedgemm.table.sheet import locked
from tunedgemm.table.untuned import read_untuned
from tunedgemm.workload.capture import Capture, recorder

pytestmark = pytest.mark.usefixtures("no_writer")

OP = op_named("a16w16")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "bf16_untuned_gemm.csv"


def shape(m: int, **more: object) -> Shape:
    return Shape("a16w16", m, 64, 64, **more)


def call(capture: Capture, m: int, times: int = 1) -> None:
    counter = capture.register(shape(m))
    for _ in range(times):
        counter[0] += 1


def counts(path) -> dict[int, int]:
    return {entry.shape.m: entry.count for entry in read_untuned(path, OP)}


def both(path) -> dict[int, tuple[int, int]]:
    return {entry.shape.m: (entry.count, entry.graph) for entry in read_untuned(path, OP)}


def test_a_shape_is_on_disk_at_its_first_call(path):
    """A shape's row is written at once, in AITER's columns and a count;
    calls after it are added by a flush."""
    capture = Capture(OP, path)
    counter = capture.register(shape(3, outdtype="fp32", epilogue="bias"))
    assert path.read_text().splitlines() == [
        "M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,count,graph",
        "3,64,64,True,torch.bfloat16,torch.float32,False,False,1,0",
    ]
    counter[0] += 7
    capture.flush()
    capture.flush()
    assert counts(path) == {3: 7}


def test_a_second_call_gets_the_same_counter(path):
    """A shape has one counter in a process; the bias's dtype, which no table tells apart, makes no other."""
    capture = Capture(OP, path)
    counter = capture.register(shape(3, epilogue="bias"))
    assert capture.register(shape(3, epilogue="bias", bias_dtype="fp32")) is counter
    assert capture.register(shape(3)) is not counter
    assert len(read_untuned(path, OP)) == 2


def test_an_empty_batch_is_not_captured(path):
    """M = 0 needs no tuning: such a call gets a counter and no row."""
    capture = Capture(OP, path)
    call(capture, 0, 5)
    capture.flush()
    assert not path.exists()


def test_layouts_and_scales_are_kept(path):
    """Shapes that AITER's columns cannot tell apart stay apart, in columns after them."""
    shapes = [shape(1), shape(1, layout="aiter32x16"), shape(1, layout="aiter16x16"), shape(1, dtype="fp8_e4m3fn", scale="tensor")]
    for met in shapes:
        Capture(OP, path).register(met)
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


def test_a_file_that_vanishes_is_made_again(path):
    """After the file is deleted, later shapes are captured."""
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


def test_failures_are_logged_once_and_retried(path, caplog):
    """If nothing can be written, the model continues; once it can, everything counted since is written."""
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


def test_a_locked_file_delays_a_model_once(path, caplog, monkeypatch):
    """A process that holds the lock costs one wait, not one per shape; shapes are written afterwards."""
    monkeypatch.setattr("tunedgemm.workload.capture._PATIENCE", 0.5)
    capture = Capture(OP, path)
    with locked(path), caplog.at_level(logging.WARNING, "tunedgemm"):
        start = time.monotonic()
        for m in range(1, 21):
            call(capture, m, 2)
        assert time.monotonic() - start < 5
    assert len(caplog.messages) == 1 and "has held the lock" in caplog.text
    capture.flush()
    assert counts(path) == dict.fromkeys(range(1, 21), 2)


def test_the_recorder_of_an_op():
    """An op has one recorder in a process, which writes the user's untuned file."""
    capture = recorder(OP)
    assert capture is recorder(OP)
    assert capture.path == untuned_path(OP)
    capture.register(shape(9))
    assert counts(untuned_path(OP)) == {9: 1}


def test_calls_of_two_kinds_are_counted_apart(path):
    """Recorded calls are counted apart from eager ones, from the first row on."""
    capture = Capture(OP, path)
    first, second = capture.register(shape(1), recorded=True), capture.register(shape(2))
    assert both(path) == {1: (0, 1), 2: (1, 0)}
    first[1] += 3
    second[0] += 1
    second[1] += 2
    capture.flush()
    capture.flush()
    assert both(path) == {1: (0, 3), 2: (1, 2)}


def test_a_file_system_without_locks_is_survived(path, caplog, monkeypatch):
    """Whatever writing raises, the model continues and the log has one line."""

    def refuse(*_, **__):
        raise NotImplementedError("no flock here")

    capture = Capture(OP, path)
    monkeypatch.setattr("filelock.FileLock.acquire", refuse)
    call(capture, 1, 2)
    call(capture, 2, 2)
    capture.flush()
    assert len(caplog.messages) == 1 and "no flock here" in caplog.text
    monkeypatch.undo()
    capture.flush()
    assert counts(path) == {1: 2, 2: 2}
