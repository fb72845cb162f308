"""Capture on a GPU: calls recorded into graphs are counted apart, whoever captures the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import tunedgemm
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.integrations.patching import patched
from tunedgemm.ops import op_named
from tunedgemm.table.folders import untuned_path
from tunedgemm.table.untuned import read_untuned
from tunedgemm.workload.capture import recorder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),  # Inductor warms its pool with one
]

OP = op_named("a16w16")
N, K = 64, 128


@pytest.fixture
def gemm() -> Callable[..., torch.Tensor]:
    """Return a separate instance that captures."""
    return TunedGemm(settings=Settings(capture=True)).gemm_a16w16


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(N, K, dtype=torch.bfloat16, device="cuda")


def rows_of(m: int) -> torch.Tensor:
    return torch.randn(m, K, dtype=torch.bfloat16, device="cuda")


def counts() -> dict[int, tuple[int, int]]:
    """Calls that ran and calls that were recorded, by M."""
    recorder(OP).flush()
    return {row.shape.m: (row.count, row.graph) for row in read_untuned(untuned_path(OP), OP)}


def test_calls_recorded_into_a_graph_are_counted_apart(gemm, weight) -> None:
    """Calls inside torch.cuda.graph are recorded, a replay does not count, and results match eager."""
    x, other = rows_of(4), rows_of(6)
    for _ in range(3):
        wanted = gemm(x, weight)
    gemm(other, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            out = gemm(x, weight)
        gemm(other, weight)

    assert counts() == {4: (3, 5), 6: (1, 1)}
    for _ in range(10):
        graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(out, wanted)
    assert counts() == {4: (3, 5), 6: (1, 1)}
    gemm(x, weight)
    assert counts() == {4: (4, 5), 6: (1, 1)}


@pytest.mark.parametrize("biased", [False, True])
def test_a_shape_first_met_inside_a_capture_is_recorded(gemm, weight, biased: bool) -> None:
    """Its row is on disk at once and marks the call as recorded; the capture is not spoilt."""
    bias = torch.randn(N, dtype=torch.bfloat16, device="cuda") if biased else None
    gemm(rows_of(1), weight, bias)
    x = rows_of(9)
    torch.cuda.synchronize()
    graph, found = torch.cuda.CUDAGraph(), {}
    with torch.cuda.graph(graph):
        out = gemm(x, weight, bias)
        found = {row.shape.m: (row.count, row.graph) for row in read_untuned(untuned_path(OP), OP)}
        gemm(x, weight, bias)
    graph.replay()
    torch.cuda.synchronize()

    assert found[9] == (0, 1)
    assert counts() == {1: (1, 0), 9: (0, 2)}
    torch.testing.assert_close(out, torch.nn.functional.linear(x, weight, bias))


def test_captures_on_streams_are_separate(gemm, weight) -> None:
    """During a capture, calls on a joined stream are recorded and those on a third one are eager."""
    x, first, joined, third = rows_of(5), torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Stream()
    for stream in (first, joined, third):
        with torch.cuda.stream(stream):
            gemm(x, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=first, capture_error_mode="relaxed"):
        gemm(x, weight)
        joined.wait_stream(first)
        with torch.cuda.stream(joined):
            gemm(x, weight)
            gemm(x, weight)
        first.wait_stream(joined)
        with torch.cuda.stream(third):
            gemm(x, weight)
    graph.replay()
    torch.cuda.synchronize()

    assert counts() == {5: (3 + 1, 3)}


def test_operands_on_the_cpu_are_never_recorded(gemm, weight) -> None:
    """A call on the CPU runs at once, also during a capture."""
    there, x, plain = rows_of(4), torch.randn(3, K), torch.randn(N, K)
    gemm(there, weight)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        gemm(there, weight)
        gemm(x, plain)

    assert counts() == {4: (1, 1), 3: (1, 0)}


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The default instance captures."""
    monkeypatch.setenv("AITER_TUNE_GEMM", "1")
    tunedgemm.reload()
    torch._dynamo.reset()
    yield
    monkeypatch.undo()
    tunedgemm.reload()


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_graphs_of_torch_compile(captured: None, dynamic: bool) -> None:
    """With mode="reduce-overhead" calls are eager while torch warms up, then recorded, then replayed."""
    layer = torch.nn.Linear(K, N, dtype=torch.bfloat16, device="cuda")
    inputs = {m: rows_of(m) for m in (4, 7)}
    with patched(), torch.no_grad():
        compiled = torch.compile(lambda x: torch.relu(layer(x)) + 1, mode="reduce-overhead", fullgraph=True, dynamic=dynamic)
        for x in inputs.values():
            for _ in range(4):
                compiled(x)
        torch.cuda.synchronize()
        before = counts()
        outs = {m: [compiled(x).clone() for _ in range(3)][-1] for m, x in inputs.items()}
    assert counts() == before
    for m, x in inputs.items():
        assert min(before[m]) >= 1, before
        with torch.no_grad():
            torch.testing.assert_close(outs[m], torch.relu(layer(x)) + 1)
