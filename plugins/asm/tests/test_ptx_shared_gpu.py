"""Share launchers of generated PTX on a Hopper GPU: repeated bits, graphs, threads."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from tunedgemm.plugin import Device, Launcher, Shape, Solution
from tunedgemm.testing.launching import bind_launcher, draw_operands
from tunedgemm.testing.sharing import differing_calls
from tunedgemm_asm import asm

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")]

#: Replays of each graph; launches in a graph.
REPLAYS, LAUNCHES = 5000, 2
#: Module of `gpu_kinds`, and two of its kinds.
PAIRS = [
    ("plain", "plain", "split"),
    ("plain", "cluster", "swapped split"),
    ("plain", "rows", "blocks cluster"),
    ("plain", "int8 split", "blocks"),
    ("plain", "turns cluster split", "panels split"),
    ("stream-K", "plain", "turns"),
    ("stream-K", "swapped", "blocks"),
    ("stream-K", "turns cluster", "two blocks an SM"),
]
modules = pytest.mark.parametrize("module", ["plain", "columns", "stream-K"])


def bound(kind: tuple[Any, ...], device: Device) -> tuple[Launcher, Shape]:
    """Return the launcher of a kind, and its shape."""
    shape, config, *splits = kind
    return bind_launcher(asm, Solution("asm", config.name, splits[0] if splits else 1), shape, device), shape


@modules
def test_a_thousand_calls_have_the_same_bits(module: str, gpu_kinds: dict[str, Any], device: Device, failing: Any) -> None:
    """A thousand calls have the same bits; another test compares them with the product."""

    def check(kind: str) -> None:
        launcher, shape = bound(gpu_kinds[module][kind], device)
        assert differing_calls(launcher, draw_operands(shape, device), 1000) == 0

    assert not failing(check, itertools.product(gpu_kinds[module]))


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_graphs_on_two_streams_next_to_other_work_have_the_same_bits(
    pair: tuple[str, str, str], gpu_kinds: dict[str, Any], device: Device
) -> None:
    """Ten thousand replays on two streams have the same bits while copies delay loads."""
    chance, replays, kept = random.Random(0), [], []
    copied = torch.zeros(1 << 28, dtype=torch.uint8, device=device.torch_device)
    module, *kinds = pair
    for kind in kinds:
        launcher, shape = bound(gpu_kinds[module][kind], device)
        given = draw_operands(shape, device)
        first, different = launcher.call(*given).clone(), torch.zeros((), dtype=torch.int64, device=device.torch_device)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device.torch_device)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(LAUNCHES):
                different += (launcher.call(*given) != first).sum()
        replays.append((graph, stream, different))
        kept += [given, first]  # whose addresses the graph has
    other = torch.cuda.Stream(device.torch_device)
    for number in range(REPLAYS):
        for graph, stream, _ in replays:
            with torch.cuda.stream(stream):
                graph.replay()
        if number % 8 == 0:
            with torch.cuda.stream(other):
                size = chance.randint(1, 1 << chance.randint(12, 27))
                copied[:size].copy_(copied[-size:])
        if number % 500 == 499:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    assert [different.item() for *_, different in replays] == [0, 0]
