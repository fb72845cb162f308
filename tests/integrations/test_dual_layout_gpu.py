"""Weights in two orders on a GPU, by real kernels: every change reaches calls, streams and graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import tunedgemm
from tunedgemm.backends.backend import Backend
from tunedgemm.device import Device, current_device
from tunedgemm.dispatch.preshuffle import PRESHUFFLE_M_THRESHOLD
from tunedgemm.dispatch.tuned_gemm import tgemm
from tunedgemm.errors import OperandError
from tunedgemm.libtypes import BUILTIN
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, write_rows

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

N, K, MANY = 512, 1024, PRESHUFFLE_M_THRESHOLD
BF16 = torch.bfloat16
LAYOUTS = ("columns128", "aiter16x16")


def first_bound(shape: Shape, device: Device) -> Solution | None:
    """Return the first solution of an installed backend but torch's that binds."""
    for libtype in tgemm.dispatcher.registry.libtypes:
        backend = tgemm.dispatcher.registry.get(libtype)
        if libtype == BUILTIN or not isinstance(backend, Backend) or backend.refusal(shape, device):
            continue
        for solution in backend.solutions(shape, device)[:4]:
            backend.prepare(solution, shape, device)
            if hasattr(backend.bind(solution, shape, device), "call"):
                return solution
    return None


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """Tune 1 and 128 rows of a shuffled weight to real kernels, untimed."""
    tunedgemm.reload()
    device = current_device()
    shapes = [Shape("a16w16", m, N, K, layout=request.param) for m in (1, MANY)]
    solutions = [first_bound(shape, device) for shape in shapes]
    if solutions[1] is None:
        pytest.skip(f"no backend has kernels for {request.param} on {device}")
    place: dict[str, Any] = {"gfx": device.gfx, "cu_num": device.cu_num, "device": device.name, "us": 1.0}
    rows = [Row(shape=shape, solution=each, **place) for shape, each in zip(shapes, solutions, strict=True) if each is not None]
    write_rows(tmp_path / "t.csv", op_named("a16w16"), rows)
    monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", str(tmp_path / "t.csv"))
    tunedgemm.reload()
    yield request.param
    monkeypatch.undo()
    tunedgemm.reload()


def drawn(seed: int, rows: int = N) -> torch.Tensor:
    return torch.randn(rows, K, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(BF16)


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.float(), wanted.float(), rtol=0.03, atol=0.03 * float(wanted.abs().max()))


def layer_of(layout: str) -> torch.nn.Linear:
    """Return a converted layer whose calls of many rows take the shuffled weight."""
    layer = torch.nn.Linear(K, N, bias=False, dtype=BF16, device="cuda").requires_grad_(False)
    done = tunedgemm.convert(layer, shuffle=layout, keep_plain=True)
    assert done.shuffled == ("",), done.skipped
    check(layer)
    return layer


def check(layer: torch.nn.Linear, is_shuffled: bool = True) -> None:
    """Few and many rows get the product of the present weight; the tuned dtype's many, by the copy."""
    with torch.no_grad():
        for m in (1, MANY):
            x = drawn(m, m).to(layer.weight.dtype)
            near(layer(x), torch._C._nn.linear(x, layer.weight))
    orders = layer.weight.orders if is_shuffled else None
    if orders is not None and layer.weight.dtype is BF16:
        chosen = tgemm.dispatcher.preferred(drawn(1, MANY), orders.plain, orders.shuffled, None)
        assert chosen is orders.shuffled


def test_the_copy_follows_the_weight(layout: str, gpu_change: Callable[..., object]) -> None:
    """Each way in which torch changes a weight reaches the calls of many rows, again and again."""
    layer = layer_of(layout)
    for seed in (2, 3):
        other = drawn(seed)
        gpu_change(layer, other)
        check(layer)


def test_memory_at_the_old_address_is_another_weight(layout: str) -> None:
    """A freed weight, and another that torch allocates in its place."""
    layer = layer_of(layout)
    for seed in (2, 3, 4):
        values, address = drawn(seed), layer.weight.data_ptr()
        layer.weight.data = torch.empty(0, device="cuda", dtype=BF16)
        blocks = [torch.empty_like(values) for _ in range(64)]
        [block] = [block for block in blocks if block.data_ptr() == address]
        block.copy_(values)
        layer.weight.data = block
        del block, blocks
        check(layer)


def test_another_device_and_back(layout: str) -> None:
    """A model that moves to the CPU is changed there, and has a new copy on the GPU."""
    layer = layer_of(layout)
    layer.cpu()
    layer.weight.copy_(drawn(2).cpu())
    layer.cuda()
    check(layer)


def test_a_replayed_graph_reads_the_present_weight(layout: str) -> None:
    """Graphs captured with a fresh and with an outdated copy follow a weight that changes in place."""
    layer, x = layer_of(layout), drawn(7, MANY)
    tunedgemm.prewarm(layer, m=MANY)
    with torch.no_grad():
        for outdated in (False, True):
            if outdated:
                layer.weight.mul_(2)
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                out = layer(x)
            for seed in (2, 3):
                layer.weight.copy_(drawn(seed))
                graph.replay()
                torch.cuda.synchronize()
                near(out, torch._C._nn.linear(x, layer.weight))
            check(layer)


def test_graphs_that_write_are_followed_while_they_train(layout: str) -> None:
    """Replayed steps count nothing: a trained weight has no copy, a frozen one needs `refresh`."""
    layer = layer_of(layout)
    layer.requires_grad_()
    layer.weight.grad = drawn(2)
    optimiser = torch.optim.Adam(layer.parameters(), lr=1.0, fused=True, capturable=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        optimiser.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimiser.step()
    for _ in range(3):
        graph.replay()
        check(layer, is_shuffled=False)
        assert layer.weight.orders is None
    layer.requires_grad_(False)
    check(layer)
    graph.replay()
    with pytest.raises(AssertionError):
        check(layer)
    tunedgemm.refresh(layer)
    check(layer)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # Inductor's advice
def test_a_compiled_layer_reads_the_present_weight(layout: str, mode: str) -> None:
    """Inductor's graphs, and its CUDA graphs, follow a weight that changes in place or is replaced."""
    layer, x = layer_of(layout), drawn(7, MANY)
    compiled = torch.compile(layer, mode=mode, fullgraph=True)
    with torch.no_grad():
        for seed in range(2, 6):
            for _ in range(3):
                near(compiled(x).clone(), torch._C._nn.linear(x, layer.weight))
            layer.weight.data += drawn(seed)
        layer.weight = torch.nn.Parameter(drawn(9), requires_grad=False)
        near(compiled(x).clone(), torch._C._nn.linear(x, layer.weight))


def test_streams_of_other_threads_wait_for_the_copy(layout: str) -> None:
    """Four threads with a stream each, which meet a changed weight at once, get its product."""
    layer, failed = layer_of(layout), []
    x = drawn(7, MANY)
    for seed in range(2, 12):
        layer.weight.copy_(drawn(seed))
        wanted = torch._C._nn.linear(x, layer.weight)
        torch.cuda.synchronize()
        start = threading.Barrier(4)

        def call(wanted: torch.Tensor = wanted, start: threading.Barrier = start) -> None:
            torch.cuda.set_device(0)  # cuBLAS warns in a thread without a context
            stream = torch.cuda.Stream()
            start.wait()
            with torch.cuda.stream(stream), torch.inference_mode():
                for _ in range(4):
                    out = layer(x)
                    stream.synchronize()
                    try:
                        near(out, wanted)
                    except AssertionError as error:
                        failed.append(error)

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed


def test_an_outdated_copy_of_the_callers_raises(layout: str) -> None:
    """`gemm_a16w16` with both weights refuses a copy of earlier values, at its first call and later."""
    x, weight = drawn(7, MANY), drawn(1)
    shuffled = tunedgemm.shuffle_weight(weight, layout)
    near(tunedgemm.gemm_a16w16(x, weight, shuffled_weight=shuffled), torch._C._nn.linear(x, weight))
    weight.add_(drawn(2))
    for _ in range(2):
        with pytest.raises(OperandError, match="has changed since shuffle_weight"):
            tunedgemm.gemm_a16w16(x, weight, shuffled_weight=shuffled)
    shuffled.data = tunedgemm.shuffle_weight(weight, layout)
    near(tunedgemm.gemm_a16w16(x, weight, shuffled_weight=shuffled), torch._C._nn.linear(x, weight))
