"""cuBLASLt on a GPU: awkward operands, threads and streams, graphs, several devices."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import pytest
import torch
import tunedgemm
from torch.nn.functional import linear
from tunedgemm.plugin import Launcher, Shape, Solution, device_of
from tunedgemm_hipblaslt import cublaslt
from tunedgemm_hipblaslt.descriptors import locked_descriptors
from tunedgemm_hipblaslt.launch import TOP_RESULTS
from tunedgemm_hipblaslt.library import load_library
from tunedgemm_hipblaslt.limits import make_problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.version.cuda is None, reason="cuBLASLt is NVIDIA's"),
]
BF16 = torch.bfloat16


def bound(shape: Shape, place: int = 0, index: int = 0) -> Launcher:
    """The launcher of one of a shape's solutions; it must bind."""
    solutions = list(cublaslt.enumerate_solutions(shape, device_of(index)))
    launcher = cublaslt.bind(solutions[place % len(solutions)], shape, device_of(index))
    assert isinstance(launcher, Launcher), launcher
    return launcher


def draw(*sizes: int, device: str = "cuda:0") -> torch.Tensor:
    """Normal numbers in bf16."""
    return torch.randn(*sizes, device=device, dtype=BF16)


def close(out: torch.Tensor, *operands: torch.Tensor) -> bool:
    """Whether an output is the product of its operands."""
    exact = linear(*(operand.float() for operand in operands))
    return bool((out.float() - exact).norm() <= 2**-7 * exact.norm() + 1e-6)


@pytest.mark.parametrize(("m", "n", "k"), [(3, 1, 64), (5, 64, 1), (1, 1, 1), (16, 256, 8190), (7, 129, 511), (1, 8192, 1024)])
@pytest.mark.parametrize("bias", [False, True])
def test_awkward_sizes(m: int, n: int, k: int, bias: bool) -> None:
    """Every listed solution of a size that fits no vector is right, and some are listed."""
    shape, device = Shape("a16w16", m, n, k, epilogue="bias" if bias else "none"), device_of(0)
    operands = (draw(m, k), draw(n, k), *((draw(n),) if bias else ()))
    solutions = list(cublaslt.enumerate_solutions(shape, device))
    assert solutions
    for solution in solutions:
        launcher = cublaslt.bind(solution, shape, device)
        assert isinstance(launcher, Launcher), f"{solution}: {launcher}"
        assert close(launcher.call(*operands), *operands), solution


def test_views_at_an_offset_are_served() -> None:
    """Operands that begin 16 or 2 bytes into their memory give the right numbers through dispatch."""
    for offset in (8, 1):
        x, weight = draw(16 * 512 + offset)[offset:].view(16, 512), draw(256 * 512 + offset)[offset:].view(256, 512)
        assert close(tunedgemm.TunedGemm().gemm_a16w16(x, weight), x, weight)
    shape = Shape("a16w16", 16, 256, 512)
    x, weight = draw(16 * 512 + 8)[8:].view(16, 512), draw(256 * 512 + 8)[8:].view(256, 512)
    assert close(bound(shape).call(x, weight), x, weight)


def test_more_than_two_thousand_million_elements() -> None:
    """An output whose last element lies beyond 2^31 is right at both ends."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free memory")
    m, n, k = 36_000, 61_440, 64
    x, weight = draw(m, k), draw(n, k)
    out = bound(Shape("a16w16", m, n, k)).call(x, weight)
    for rows in (slice(0, 64), slice(m - 64, m)):
        assert close(out[rows], x[rows], weight)


def test_threads_on_streams_have_their_own_biases() -> None:
    """Eight threads on two streams call one launcher with different biases at once; each gets its own numbers."""
    m, n, k = 32, 1024, 512
    launcher = bound(Shape("a16w16", m, n, k, epilogue="bias"))
    x, weight = draw(m, k), draw(n, k)
    streams, failures = [torch.cuda.Stream(), torch.cuda.Stream()], []

    def work(number: int) -> None:
        bias = torch.full((n,), float(number), device="cuda:0", dtype=BF16)
        with torch.cuda.stream(streams[number % 2]):
            streams[number % 2].wait_stream(torch.cuda.default_stream())
            for _ in range(200):
                out = launcher.call(x, weight, bias)
            streams[number % 2].synchronize()
            if not close(out, x, weight, bias):
                failures.append(number)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def captured(call: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of one call, and its output."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


def divided(shape: Shape) -> Solution:
    """A solution that needs scratch, as those that divide K do."""
    for solution in cublaslt.enumerate_solutions(shape, device_of(0)):
        for candidate in (solution, *cublaslt.refine(solution, shape, device_of(0))):
            launcher = cublaslt.bind(candidate, shape, device_of(0))
            if isinstance(launcher, Launcher) and launcher.workspace_bytes:
                return candidate
    pytest.skip("nothing of this library divides K with scratch here")


def test_two_graphs_share_nothing() -> None:
    """Two graphs of one solution with scratch, replayed at once on two streams beside eager calls, never disturb each other."""
    shape = Shape("a16w16", 16, 512, 8192)
    launcher = cublaslt.bind(divided(shape), shape, device_of(0))
    assert isinstance(launcher, Launcher)
    weight, inputs = draw(512, 8192), [draw(16, 8192) for _ in range(3)]
    launcher.call(inputs[0], weight)
    graphs = [captured(lambda x=x: launcher.call(x, weight)) for x in inputs[:2]]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(50):
        for stream, (graph, _) in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        eager = launcher.call(inputs[2], weight)
    torch.cuda.synchronize()
    for x, out in zip(inputs, [*(out for _, out in graphs), eager], strict=True):
        assert close(out, x, weight)


def test_a_graph_right_after_prewarm() -> None:
    """The first call that a process makes of a shape may be the one that is captured, after prewarm."""
    gemm, shape = tunedgemm.TunedGemm(), Shape("a16w16", 8, 384, 640, epilogue="bias")
    gemm.dispatcher.prewarm([shape])
    x, weight, bias = draw(8, 640), draw(384, 640), draw(384)
    graph, out = captured(lambda: gemm.gemm_a16w16(x, weight, bias))
    graph.replay()
    torch.cuda.synchronize()
    assert close(out, x, weight, bias)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_devices_in_one_process() -> None:
    """Launchers of two devices give the right numbers, whichever device is the current one."""
    shape = Shape("a16w16", 16, 512, 1024)
    launchers = [bound(shape, index=index) for index in (0, 1)]
    for current, index in itertools.product((0, 1), (0, 1)):
        with torch.cuda.device(current):
            x, weight = draw(16, 1024, device=f"cuda:{index}"), draw(512, 1024, device=f"cuda:{index}")
            out = launchers[index].call(x, weight)
            assert out.device.index == index
            assert close(out, x, weight)


def test_a_name_makes_the_same_algorithm_again() -> None:
    """What the library's answers hold is all in their names: made again from them, they are the same bytes."""
    for m in (1, 16, 256, 4096):
        with locked_descriptors(load_library(cublaslt.abi), make_problem(Shape("a16w16", m, 7168, 2048)), 0) as described:
            for answer in described.heuristic_results(TOP_RESULTS, cublaslt.abi.workspace):
                assert described.init_algo(described.read_config(answer.algo)) == answer.algo
