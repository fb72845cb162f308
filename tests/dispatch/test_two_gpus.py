"""Two GPUs in one process: dispatch serves tensors of both, whichever device is current."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import tunedgemm
from tunedgemm.backends.backend import Backend
from tunedgemm.backends.registry import Registry
from tunedgemm.device import device_of
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.errors import OperandError
from tunedgemm.ops import op_named
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.table.csvfile import Row, upsert

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

GPUS = (0, 1)
SHAPES = (
    Shape("a16w16", 16, 512, 4096),
    Shape("a16w16", 300, 384, 1024, epilogue="bias"),
    Shape("a8w8", 32, 1024, 2048, dtype="fp8_e4m3fn", outdtype="bf16", scale="row"),
    Shape("a8w8_blockscale", 64, 512, 1024, dtype="fp8_e4m3fn", outdtype="bf16", scale="block"),
)
LIBTYPES = ("torch", "cublaslt", "asm", "skinny", "triton")


@pytest.fixture(params=list(itertools.product(LIBTYPES, SHAPES)), ids=lambda pair: f"{pair[0]}-{pair[1].op}-{pair[1].m}")
def served(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Dispatcher, Shape, str]:
    """A dispatcher whose table names one solution of a backend, the shape, and the libtype."""
    libtype, shape = request.param
    backend = Registry().get(libtype)
    device = device_of(0)
    if not isinstance(backend, Backend) or backend.refusal(shape, device):
        pytest.skip(f"{libtype} does not serve {shape} on {device}")
    solutions = backend.solutions(shape, device)
    solution = next((each for each in solutions if each.split_k > 1), solutions[0])  # splits need a workspace
    path = tmp_path / "tuned.csv"
    row = Row(shape=shape, gfx=device.gfx, cu_num=device.cu_num, device=device.name, solution=solution, us=1.0, err_ratio=0.0, libver="")
    upsert(path, op_named(shape.op), [row])
    return Dispatcher(op_named(shape.op), above=(path,)), shape, libtype


def operands_on(op: Op, shape: Shape, index: int, seed: int = 0) -> tuple[Any, ...]:
    """Draw operands on a GPU."""
    return op.make_inputs(shape, torch.device("cuda", index), seed)


def require_right(op: Op, shape: Shape, operands: tuple[Any, ...], out: torch.Tensor) -> None:
    """Compare an output with the reference on its own GPU."""
    assert out.device == operands[0].device
    wanted = op.reference(shape, operands).float()
    torch.testing.assert_close(out.float(), wanted, rtol=0.05, atol=0.02 * float(wanted.abs().max()))


def test_tensors_of_both_whichever_is_current(served: tuple[Dispatcher, Shape, str]) -> None:
    """Each GPU's tensors get the table's solution on that GPU, and the current device stays."""
    dispatcher, shape, libtype = served
    for current, index, _ in itertools.product(GPUS, GPUS, range(3)):
        operands = operands_on(dispatcher.op, shape, index)
        with torch.cuda.device(current):
            out = dispatcher.call(*operands)
            assert torch.cuda.current_device() == current
            require_right(dispatcher.op, shape, operands, out)
    assert not dispatcher._vetoes
    for index in GPUS:
        assert dispatcher.bound(shape, device_of(index)).offer.solution.libtype == libtype


def test_graphs_of_both(served: tuple[Dispatcher, Shape, str]) -> None:
    """A graph on each GPU, replayed in turns, gives each GPU's own numbers."""
    dispatcher, shape, _ = served
    graphs: list[tuple[torch.cuda.CUDAGraph, tuple[Any, ...], torch.Tensor]] = []
    for index in GPUS:
        with torch.cuda.device(index):
            operands = operands_on(dispatcher.op, shape, index, seed=index)
            dispatcher.prewarm([shape], device_of(index))
            dispatcher.call(*operands)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.Stream()):  # torch's default stream is that of the first capture's GPU
                out = dispatcher.call(*operands)
            graphs.append((graph, operands, out))
    for _, (graph, operands, out) in itertools.product(range(5), graphs):
        out.zero_()
        graph.replay()
        torch.cuda.synchronize(out.device)
        require_right(dispatcher.op, shape, operands, out)


def test_threads_and_streams_of_both(served: tuple[Dispatcher, Shape, str]) -> None:
    """Four threads, each on a stream of one of the GPUs, share nothing that changes a number."""
    dispatcher, shape, _ = served
    failures: list[str] = []

    def work(number: int) -> None:
        index = number % 2
        with torch.cuda.device(index), torch.cuda.stream(torch.cuda.Stream()):
            operands = operands_on(dispatcher.op, shape, index, seed=number)
            wanted = dispatcher.call(*operands)
            for _ in range(50):
                out = dispatcher.call(*operands)
            torch.cuda.current_stream().synchronize()
            try:
                require_right(dispatcher.op, shape, operands, out)
                require_right(dispatcher.op, shape, operands, wanted)
            except AssertionError as error:
                failures.append(f"thread {number}: {error}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_peer_copies_are_ordered_with_products(served: tuple[Dispatcher, Shape, str]) -> None:
    """Activations copied from the other GPU arrive before the product, and its output before the
    copy back.
    """
    dispatcher, shape, _ = served
    first, *rest = operands_on(dispatcher.op, shape, 0, seed=3)
    others = [None if operand is None else operand.to("cuda:1") for operand in rest]
    wanted = dispatcher.op.reference(shape, (first, *rest)).float()
    for _ in range(5):
        there = first.to("cuda:1", non_blocking=True)
        out = dispatcher.call(there, *others)
        back = out.to("cuda:0", non_blocking=True).float()
        torch.testing.assert_close(back, wanted, rtol=0.05, atol=0.02 * float(wanted.abs().max()))


def test_operands_of_two_gpus_are_refused() -> None:
    """A weight on another GPU than x is an error that names both devices."""
    x, weight = torch.zeros(4, 64, device="cuda:0", dtype=torch.bfloat16), torch.zeros(32, 64, device="cuda:1", dtype=torch.bfloat16)
    with pytest.raises(OperandError, match=r"cuda:0.*cuda:1|cuda:1.*cuda:0"):
        tunedgemm.gemm_a16w16(x, weight)
