"""Replays on a GPU: captured kernels of class rows give the same bits each time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tunedgemm.backends.backend import Backend
from tunedgemm.backends.launcher import Launcher
from tunedgemm.backends.registry import Registry
from tunedgemm.device import current_device
from tunedgemm.ops import op_named
from tunedgemm.table.csvfile import read_rows

RESULTS = Path(__file__).parents[2] / "benchmarks/results/h200-2026-11-29"
#: Replays of each graph; the largest M, so that they take seconds; the M of a row for any M.
REPLAYS, MOST, ANY = 10_000, 512, 100


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(("name", "file"), [("a16w16", "bf16-class-rows.csv"), ("a8w8", "fp8-channel-class-rows.csv")])
def test_ten_thousand_replays_in_turn_have_equal_bits(name: str, file: str) -> None:
    """Graphs of all rows of measured classes take turns, and each compares its output on the device."""
    device, registry, op = current_device(), Registry(), op_named(name)
    if device.gfx != "sm_90":
        pytest.skip(f"the rows are for sm_90 (got {device.gfx})")
    graphs, kept, wrong = [], [], torch.zeros((), dtype=torch.bool, device=device.torch_device)
    for row in read_rows(RESULTS / file, op)[0]:
        backend, shape = registry.get(row.solution.libtype), row.shape.with_m(row.shape.m or ANY)
        if shape.m > MOST or not isinstance(backend, Backend):
            continue
        launcher = backend.bind(row.solution, shape, device)
        if isinstance(launcher, Launcher):
            operands = op.make_inputs(shape, device.torch_device, 0)
            first = launcher.call(*operands).view(torch.int16).clone()
            kept.append((operands, first))  # a graph holds no operands
            graphs.append(_compared(launcher, operands, first, wrong))
    assert len(graphs) >= 16
    for _ in range(REPLAYS):
        for graph in graphs:
            graph.replay()
    assert not wrong.item()


def _compared(launcher: Launcher, operands: tuple[torch.Tensor, ...], first: torch.Tensor, wrong: torch.Tensor) -> torch.cuda.CUDAGraph:
    """Capture a call whose output is compared with an earlier one, bit for bit."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrong.logical_or_((launcher.call(*operands).view(torch.int16) != first).any())
    return graph
