"""Graphs, streams, threads without a context, and a second device, on a GPU."""

from __future__ import annotations

import threading

import pytest
import torch
from tunedgemm.plugin import Device, Launcher, Shape, Solution, device_of
from tunedgemm.testing.launching import bind_launcher, draw_operands, fault_of
from tunedgemm.testing.sharing import fault_of_graphs, fault_of_threads
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


def bound(kernel: KernelConfig, splits: int, device: Device, shape: Shape = SHAPE) -> Launcher:
    """Bind a kernel; skip where it is unfit."""
    if reason := unfit(kernel, splits or 1, shape, device.gfx):
        pytest.skip(reason)
    return bind_launcher(skinny, Solution("skinny", kernel.name, splits), shape, device)


@kernels
def test_graphs_and_threads_share_a_launcher(kernel: KernelConfig, splits: int, device: Device) -> None:
    """Two graphs and eight threads get the bits of a single call; a split leaves its counters zero."""
    launcher, inputs = bound(kernel, splits, device), [draw_operands(SHAPE, device, seed) for seed in range(8)]
    assert not fault_of_graphs(launcher, inputs[:4], replays=10)
    assert not fault_of_threads(launcher, inputs, calls=50)


def test_a_thread_without_a_context_binds_and_launches(device: Device) -> None:
    """Such a thread has no context; it gets the device's."""
    given, outs = draw_operands(SHAPE, device), []
    torch.empty((4, 1280), dtype=torch.bfloat16, device="cuda")  # torch reuses it without a CUDA call
    kernel = Rows(1, 2, 1, 2)

    def work() -> None:
        outs.append(bound(kernel, 0, device).call(*given))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert not fault_of(SHAPE, outs[0], given)


def test_the_other_device_gets_its_own_launch() -> None:
    """A launcher of device 1 runs there while device 0 is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("only one GPU")
    device = device_of(1)
    given = draw_operands(SHAPE, device)
    with torch.cuda.device(0):
        outs = [bound(kernel, splits, device).call(*given) for kernel, splits in ((Rows(2, 4, 1, 4), 0), (Tiles(1, 2, 2, 4), 4))]
    assert all(out.device.index == 1 and not fault_of(SHAPE, out, given) for out in outs)
