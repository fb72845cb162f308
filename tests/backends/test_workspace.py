"""workspace: growing scratch per thread and stream, and semaphores that start at zero."""

import threading

import pytest
import torch
from tunedgemm.backends import workspace as workspace_module
from tunedgemm.backends.workspace import scratch, semaphores, workspace

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def empty(monkeypatch):
    """No buffers from other tests."""
    monkeypatch.setattr(workspace_module, "_buffers", {})
    monkeypatch.setattr(workspace_module, "_semaphores", {})


def test_reused_until_too_small():
    """A request that fits gets the same memory; a larger one gets more."""
    first = workspace(100, CPU)
    assert first.dtype == torch.uint8
    assert workspace(50, CPU).data_ptr() == first.data_ptr()
    assert workspace(1000, CPU).numel() >= 1000


def test_threads_do_not_share():
    """Two threads that launch concurrently must not write to one buffer."""
    found = []
    thread = threading.Thread(target=lambda: found.append((workspace(64, CPU), semaphores(4, CPU))))
    thread.start()
    thread.join()
    assert found[0][0].data_ptr() != workspace(64, CPU).data_ptr()
    assert found[0][1].data_ptr() != semaphores(4, CPU).data_ptr()


def test_semaphores_start_at_zero_and_are_kept():
    """int32 zeros, the same at the next call, another set for another count."""
    first = semaphores(8, CPU)
    assert first.dtype == torch.int32
    assert not first.any()
    assert semaphores(8, CPU).data_ptr() == first.data_ptr()
    assert semaphores(16, CPU).numel() == 16


def test_both_at_once_are_those_of_each(monkeypatch):
    """`scratch` gives the memory of `workspace` and `semaphores`, or a capture's, with one stream look-up."""
    buffer, counters = scratch(64, 4, CPU)
    assert (buffer.data_ptr(), counters.data_ptr()) == (workspace(64, CPU).data_ptr(), semaphores(4, CPU).data_ptr())
    assert scratch(128, 4, CPU)[0].numel() == 128
    asked: list[torch.device] = []
    monkeypatch.setattr(workspace_module, "_stream_key", asked.append)
    buffer, counters = scratch(64, 4, CPU)
    assert asked == [CPU]
    assert (buffer.numel(), counters.tolist()) == (64, [0] * 4)
    assert buffer.data_ptr() != workspace(64, CPU).data_ptr()


def test_captures_own_theirs(monkeypatch):
    """During a capture no buffer is shared with calls outside it."""
    monkeypatch.setattr(workspace_module, "_stream_key", lambda device: None)
    assert workspace(64, CPU).numel() == 64
    assert workspace(64, CPU).data_ptr() != semaphores(4, CPU).data_ptr()
    assert not workspace_module._buffers
    assert not workspace_module._semaphores
    assert not semaphores(4, CPU).any()


@pytest.mark.gpu
def test_streams_do_not_share():
    """Streams, threads and captures each have separate scratch."""
    device = torch.device("cuda", 0)
    here = workspace(1024, device)
    assert workspace(1024, device).data_ptr() == here.data_ptr()
    with torch.cuda.stream(torch.cuda.Stream(device)):
        assert workspace(1024, device).data_ptr() != here.data_ptr()
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(workspace(1024, device).data_ptr()))  # on the same stream, the default one
    thread.start()
    thread.join()
    assert found != [here.data_ptr()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, counters = workspace(1024, device), semaphores(4, device)
        counters.add_(1)
    assert captured.data_ptr() != here.data_ptr()
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    assert counters.tolist() == [1, 1, 1, 1], "zeroed by a captured memset at every replay"
