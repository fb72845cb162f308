"""Graphs, streams, threads without a context, and a second device, on a GPU."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tunedgemm.plugin import Device, Launcher, Shape, Solution, device_of
from tunedgemm.tools import ops
from tunedgemm_skinny import skinny
from tunedgemm_skinny.names import KernelConfig, Rows, Tiles
from tunedgemm_skinny.resources import unfit

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

SHAPE = Shape("a16w16", 4, 1280, 8192, epilogue="bias")
#: Kernels with splits, one for each way to load and to reduce.
KERNELS: list[tuple[KernelConfig, int]] = [
    (Rows(2, 4, 1, 4), 0), (Rows(2, 2, 2, 2, True), 3), (Tiles(1, 1, 4, 4), 0), (Tiles(1, 2, 2, 4), 4), (Rows(4, 1, 4, 2, stages=4), 0),
    (Tiles(1, 1, 4, 2, stages=4), 2),
]  # fmt: skip
kernels = pytest.mark.cases(("kernel", "splits"), KERNELS)


@pytest.fixture
def device() -> Device:
    """Return the first GPU."""
    return device_of(0)


def operands(device: Device, seed: int = 0, shape: Shape = SHAPE) -> tuple[Any, ...]:
    """Make random operands on a device."""
    return ops()["a16w16"].make_inputs(shape, device.torch_device, seed)


def bound(kernel: KernelConfig, splits: int, device: Device, shape: Shape = SHAPE) -> Launcher:
    """Bind a kernel; skip where it is unfit."""
    if reason := unfit(kernel, splits or 1, shape, device.gfx):
        pytest.skip(reason)
    answer = skinny.bind(Solution("skinny", kernel.name, splits), shape, device)
    assert isinstance(answer, Launcher), answer
    return answer


def close(out: torch.Tensor, given: tuple[Any, ...], shape: Shape = SHAPE) -> bool:
    """Check an output against the reference, within the op's tolerance."""
    op = ops()["a16w16"]
    wanted = op.reference(shape, given)
    error = (out.reshape(wanted.shape).double() - wanted.double()).norm(dim=1) / wanted.double().norm(dim=1)
    return error.max().item() < op.tolerance(shape).row_error


@pytest.mark.cases("shape", [SHAPE, Shape("a16w16", 1, 7168, 2048), Shape("a16w16", 33, 333, 501), Shape("a16w16", 64, 1280, 8192)])
def test_every_enumerated_solution_is_right_and_repeats_its_bits(shape: Shape, device: Device) -> None:
    """Every solution binds, matches the reference, and gives equal bits twice."""
    given = operands(device, 0, shape)
    for solution in skinny.enumerate_solutions(shape, device):
        launcher = skinny.bind(solution, shape, device)
        assert isinstance(launcher, Launcher), f"{solution}: {launcher}"
        first, second = launcher.call(*given), launcher.call(*given)
        assert close(first, given, shape), solution
        assert torch.equal(first, second), solution


@kernels
def test_a_captured_launch_reads_new_inputs_at_each_replay(kernel: KernelConfig, splits: int, device: Device) -> None:
    """Two launches in a graph, replayed with new inputs; a split leaves its counters zero."""
    launcher, given, graph = bound(kernel, splits, device), operands(device), torch.cuda.CUDAGraph()
    launcher.call(*given)
    with torch.cuda.graph(graph):
        first, second = launcher.call(*given), launcher.call(*given)
    for seed in range(1, 5):
        given[0].copy_(operands(device, seed)[0])
        graph.replay()
        torch.cuda.synchronize()
        assert close(first, given)
        assert torch.equal(first, second)


@kernels
def test_two_graphs_of_one_launcher_replay_at_the_same_time(kernel: KernelConfig, splits: int, device: Device) -> None:
    """Two graphs of a launcher share no counters and no partials."""
    launcher, runs = bound(kernel, splits, device), []
    for seed in range(2):
        given, graph = operands(device, seed), torch.cuda.CUDAGraph()
        launcher.call(*given)
        with torch.cuda.graph(graph):
            out = [launcher.call(*given) for _ in range(20)][-1]
        runs.append((graph, out, given, torch.cuda.Stream()))
    torch.cuda.synchronize()
    for _ in range(10):
        for graph, _, _, stream in runs:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(close(out, given) for _, out, given, _ in runs)


@kernels
def test_threads_with_separate_streams_share_a_launcher(kernel: KernelConfig, splits: int, device: Device) -> None:
    """Eight threads on eight streams share a launcher, and get the bits of a single call."""
    launcher, inputs, wrong = bound(kernel, splits, device), [operands(device, seed) for seed in range(8)], []
    alone = [launcher.call(*given) for given in inputs]
    torch.cuda.synchronize()

    def work(index: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            outs = [launcher.call(*inputs[index]) for _ in range(50)]
        stream.synchronize()
        wrong.extend(index for out in outs if not torch.equal(out, alone[index]))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_thread_without_a_context_binds_and_launches(device: Device) -> None:
    """Such a thread has no context; it gets the device's."""
    given, outs = operands(device), []
    torch.empty((4, 1280), dtype=torch.bfloat16, device="cuda")  # torch reuses it without a CUDA call
    kernel = Rows(1, 2, 1, 2)

    def work() -> None:
        outs.append(bound(kernel, 0, device).call(*given))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert close(outs[0], given)


def test_the_other_device_gets_its_own_launch() -> None:
    """A launcher of device 1 runs there while device 0 is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("only one GPU")
    device = device_of(1)
    given = operands(device)
    with torch.cuda.device(0):
        outs = [bound(kernel, splits, device).call(*given) for kernel, splits in ((Rows(2, 4, 1, 4), 0), (Tiles(1, 2, 2, 4), 4))]
    assert all(out.device.index == 1 and close(out, given) for out in outs)
