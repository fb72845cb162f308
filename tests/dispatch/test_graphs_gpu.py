"""Graphs on a GPU: prewarmed shapes keep their launcher, others use torch and are recorded, and
replays allocate nothing."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator

import pytest
import torch
import tunedgemm
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.integrations.patching import patched
from tunedgemm.shape import Shape
from tunedgemm.testing.fakes import fake_backend, fake_registry
from tunedgemm.testing.listed import listed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

N, K = 256, 512
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """The default instance as a new process has it."""
    tunedgemm.reload()
    yield
    tunedgemm.reload()


def rows_of(m: int, k: int = K) -> torch.Tensor:
    return torch.randn(m, k, dtype=BF16, device="cuda")


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.float(), wanted.float(), rtol=0.03, atol=0.03 * float(wanted.abs().max()))


class Files:
    """Refuses to open any, between `closed` and the end of the block."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def closed(self) -> None:
        def refuse(*arguments: object, **_: object) -> None:
            raise AssertionError(f"opened {arguments[0]} while a graph was captured")

        self._monkeypatch.setattr("builtins.open", refuse)
        self._monkeypatch.setattr("os.open", refuse)

    def open(self) -> None:
        self._monkeypatch.undo()


@pytest.fixture
def files() -> Iterator[Files]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Files(monkeypatch)


def test_a_shape_first_met_in_a_capture_is_torchs_and_is_noted(files: Files) -> None:
    """A shape first met in a capture runs torch's call, opens no file and is listed;
    after prewarm it is bound."""
    reached: list[int] = []

    def call(solution, shape, *operands):
        reached.append(shape.m)
        return torch._C._nn.linear(*operands)

    backend = fake_backend("turbo", heuristic="fake", call=call)
    gemm = TunedGemm(fake_registry(backend), settings=Settings(untuned=("turbo",)))
    weight, x = rows_of(N), rows_of(3)
    gemm.gemm_a16w16(rows_of(1), weight)
    torch._C._nn.linear(rows_of(1), weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        files.closed()
        out = gemm.gemm_a16w16(x, weight)
        gemm.gemm_a16w16(x, weight)
        files.open()
    graph.replay()
    torch.cuda.synchronize()

    near(out, torch._C._nn.linear(x, weight))
    shape = Shape("a16w16", 3, N, K)
    assert gemm.dispatcher.unbound == {shape: 2}
    assert reached == [1]
    assert gemm.dispatcher.prewarm(list(gemm.dispatcher.unbound)) == 1
    assert gemm.dispatcher.unbound == {} and reached == [1, 3]


def two_layers() -> torch.nn.Module:
    layers = torch.nn.Linear(K, N), torch.nn.ReLU(), torch.nn.Linear(N, K, bias=False)
    return torch.nn.Sequential(*layers).to("cuda", BF16).requires_grad_(False)


def reserved() -> tuple[int, int]:
    """Bytes that torch's allocator has from the driver, and in how many segments."""
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["reserved_bytes.all.current"], len(torch.cuda.memory_snapshot())


def test_twenty_graphs_of_a_prewarmed_model_on_two_streams(files: Files) -> None:
    """Two threads capture on separate streams and pools;
    a thousand replays in turn allocate no memory."""
    model, counts = two_layers(), range(1, 21)
    with patched():
        assert tunedgemm.prewarm(model, m=counts) == 2 * len(counts)
        inputs = {m: rows_of(m) for m in counts}
        wanted = {m: model(x) for m, x in inputs.items()}
        torch.cuda.synchronize()
        graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        failed: list[BaseException] = []
        one_at_a_time = threading.Lock()  # no memory may be had from the driver while another thread captures

        def capture(mine: list[int], stream: torch.cuda.Stream) -> None:
            try:
                pool = torch.cuda.graph_pool_handle()
                with one_at_a_time, torch.cuda.stream(stream):  # torch's libraries have a handle for each thread, made at the first call
                    model(inputs[mine[0]])
                    torch.cuda.synchronize()
                for m in mine:
                    graph = torch.cuda.CUDAGraph()
                    with one_at_a_time, torch.cuda.graph(graph, pool=pool, stream=stream):
                        files.closed()
                        try:
                            out = model(inputs[m])
                        finally:
                            files.open()
                    graphs[m] = graph, out
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=capture, args=(list(counts)[start::2], torch.cuda.Stream())) for start in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed
    assert tunedgemm.unbound() == {}
    before = reserved()
    for turn in range(50):
        for m in counts if turn % 2 else reversed(counts):
            graphs[m][0].replay()
    assert reserved() == before
    for m in counts:
        near(graphs[m][1], wanted[m])
        inputs[m].mul_(2)
        graphs[m][0].replay()
        near(graphs[m][1], model(inputs[m]))


@listed("options", [{}, {"shuffle": True}, {"shuffle": True, "keep_plain": True}], ids=["plain", "shuffled", "both"])
def test_a_converted_model_in_a_graph(options: dict[str, bool], files: Files) -> None:
    """Prewarmed it is captured with its weights as they lie, few rows and many."""
    model = two_layers()
    inputs = {m: rows_of(m) for m in (1, 4, 160)}
    wanted = {m: model(x) for m, x in inputs.items()}
    with tunedgemm.convert(model, **options):
        assert tunedgemm.prewarm(model, m=tuple(inputs)) >= 2 * len(inputs)
        for m, x in inputs.items():
            graph = torch.cuda.CUDAGraph()
            model(x)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                files.closed()
                out = model(x)
                files.open()
            graph.replay()
            torch.cuda.synchronize()
            near(out, wanted[m])
    assert tunedgemm.unbound() == {}


def test_in_a_capture_an_unbound_choice_uses_the_plain_weight() -> None:
    """A call with a weight in two orders, first met during a capture,
    runs torch's call of the plain weight."""
    weight, x = rows_of(N), rows_of(160)
    shuffled = tunedgemm.shuffle_weight(weight)
    torch._C._nn.linear(rows_of(1), weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tunedgemm.gemm_a16w16(x, weight, shuffled_weight=shuffled)
    graph.replay()
    torch.cuda.synchronize()
    near(out, torch._C._nn.linear(x, weight))
    assert list(tunedgemm.unbound()) == [Shape("a16w16", 160, N, K)]
    near(tunedgemm.gemm_a16w16(x, weight, shuffled_weight=shuffled), out)


@pytest.mark.slow
def test_thousands_of_sizes_take_little_memory() -> None:
    """8,192 values of M in one process take at most 64 MiB
    over the tensors and no launcher twice."""
    weight, x = rows_of(64, 128), rows_of(8192, 128)
    for m in range(1, 257):
        tunedgemm.gemm_a16w16(x[:m], weight)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for m in range(1, 8193):
        tunedgemm.gemm_a16w16(x[:m], weight)
    torch.cuda.synchronize()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 64, f"{grown:.0f} MiB"
    assert len(tunedgemm.tgemm.dispatcher.launchers) == 8192
