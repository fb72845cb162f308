"""Run stream-K kernels on a Hopper GPU: products, repeated bits, graphs, oversubscribed grids."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch
from tunedgemm.plugin import Device, Launcher, Shape, Solution, device_of
from tunedgemm.tools import ops
from tunedgemm_asm import asm
from tunedgemm_asm.ptx.limits import unfit
from tunedgemm_asm.ptx.names import KernelConfig
from tunedgemm_asm.ptx.space import enumerate_candidates, refine

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")]

SHAPE = Shape("a16w16", 1371, 2900, 2056, epilogue="bias")
FLOATS = attrs.evolve(SHAPE, dtype="fp16", outdtype="fp32", bias_dtype="fp32")
ROWS = Shape("a8w8", 1371, 2900, 4112, "fp8_e4m3fn", "bf16", "bias", scale="row")
INT8 = attrs.evolve(ROWS, dtype="int8", outdtype="fp32")
BLOCKS = Shape("a8w8_blockscale", 1371, 2900, 4112, "fp8_e4m3fn", "bf16", scale="block")
FEW_ROWS = {"m": 13, "n": 7100}
#: A shape and a config of each kind.
KINDS = {
    "plain": (SHAPE, KernelConfig(128, 128, 6, stream=True)),
    "floats": (FLOATS, KernelConfig(128, 160, 5, stream=True)),
    "wide tile": (SHAPE, KernelConfig(128, 256, 4, stream=True)),
    "high tile": (SHAPE, KernelConfig(256, 192, 3, stream=True)),
    "two blocks an SM": (SHAPE, KernelConfig(64, 96, 4, 1, stream=True)),
    "cluster": (SHAPE, KernelConfig(128, 128, 4, cluster=2, stream=True)),
    "swapped": (attrs.evolve(SHAPE, **FEW_ROWS), KernelConfig(16, 64, 8, 1, swapped=True, stream=True)),
    "turns": (SHAPE, KernelConfig(128, 128, 6, turns=True, stream=True)),
    "turns, wide tile": (FLOATS, KernelConfig(128, 192, 5, turns=True, stream=True)),
    "turns cluster": (SHAPE, KernelConfig(128, 176, 5, cluster=2, turns=True, stream=True)),
    "panels": (attrs.evolve(SHAPE, n=2904), KernelConfig(128, 256, 4, panels=2, stream=True)),
    "rows": (ROWS, KernelConfig(128, 192, 5, promoted=True, stream=True)),
    "rows, fast": (ROWS, KernelConfig(128, 256, 4, stream=True)),
    "int8": (INT8, KernelConfig(128, 192, 5, turns=True, stream=True)),
    "blocks": (BLOCKS, KernelConfig(128, 192, 5, promoted=True, staged=True, stream=True)),
    "blocks cluster": (
        attrs.evolve(BLOCKS, n=2904),
        KernelConfig(128, 224, 4, cluster=2, promoted=True, staged=True, panels=6, stream=True),
    ),
    "blocks swapped": (attrs.evolve(BLOCKS, **FEW_ROWS), KernelConfig(16, 128, 8, swapped=True, promoted=True, staged=True, stream=True)),
}
kinds = pytest.mark.parametrize("kind", KINDS)
#: Rows of x and of the weight in tiles of 128 by 128, by the rounds of them on 132 SMs.
GRIDS = {"0.1": (3, 5), "0.8": (11, 10), "1": (11, 12), "1.1": (11, 13), "1.9": (11, 23), "2.5": (11, 30), "5.1": (22, 31)}
#: Replays of each graph; launches in a graph.
REPLAYS, LAUNCHES = 5000, 2


@pytest.fixture
def device() -> Device:
    """Return the first GPU."""
    return device_of(0)


@pytest.fixture
def nan_first(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill outputs and workspaces with NaN or the largest bytes; counters stay zero."""
    plain = torch.empty

    def filled(*sizes: Any, **options: Any) -> torch.Tensor:
        made = plain(*sizes, **options)
        if not made.is_cuda or not made.numel() or made.dtype == torch.int32:
            return made
        return made.fill_(float("nan") if made.dtype.is_floating_point else torch.iinfo(made.dtype).max)

    monkeypatch.setattr(torch, "empty", filled)
    yield


def operands(shape: Shape, device: Device, seed: int = 0) -> tuple[Any, ...]:
    """Return random operands, without an absent bias."""
    return tuple(each for each in ops()[shape.op].make_inputs(shape, device.torch_device, seed) if each is not None)


def bound(config: KernelConfig, shape: Shape, device: Device) -> Launcher:
    """Bind a configuration."""
    answer = asm.bind(Solution("asm", config.name, 1), shape, device)
    assert isinstance(answer, Launcher), answer
    return answer


def fault(out: torch.Tensor, given: tuple[Any, ...], shape: Shape) -> str:
    """Return how far the worst output row is from fp64, if it is too far."""
    op = ops()[shape.op]
    wanted = op.reference(shape, given).double()
    error = ((out.double() - wanted).norm(dim=1) / wanted.norm(dim=1)).max().item()
    return "" if error < op.tolerance(shape).row_error else f"off by {error}, {torch.isnan(out).sum().item()} NaN"


def test_each_kind_computes_its_product(device: Device, nan_first: None, failing: Any) -> None:
    """Every kind computes its product for any number of tiles, with all tails."""

    def check(kind: str, grid: str) -> None:
        (like, config), (high, wide) = KINDS[kind], GRIDS[grid]
        shape = attrs.evolve(like, n=128 * wide - 20) if config.swapped else attrs.evolve(like, m=128 * high - 37, n=128 * wide - 20)
        shape = attrs.evolve(shape, n=shape.n // 8 * 8) if config.panels else shape
        if reason := unfit(config, 1, shape):
            pytest.skip(reason)
        given = operands(shape, device)
        assert fault(bound(config, shape, device).call(*given), given, shape) == ""

    assert not failing(check, itertools.product(KINDS, GRIDS))


def test_random_products(device: Device, nan_first: None, failing: Any) -> None:
    """Listed stream-K solutions and their neighbours compute random products."""

    def check(seed: int) -> None:
        chance = random.Random(seed)
        m, n = (chance.choice((chance.randint(1, 300), chance.randint(1, 4000))) for _ in range(2))
        like = (SHAPE, FLOATS, ROWS, INT8, BLOCKS)[seed % 5]
        shape = attrs.evolve(like, m=m, n=n, k=16 * chance.choice((chance.randint(1, 60), chance.randint(60, 600))))
        listed = [Solution("asm", config.name, splits) for config, splits in enumerate_candidates(shape, device)]
        near = [each for solution in listed[:16] for each in refine("asm", solution, shape, device)]
        found = [each for each in listed + near if "_k_" in each.kernel_name]
        if not found:
            pytest.skip("all rounds are full")
        given = operands(shape, device, seed)
        for solution in chance.sample(found, min(4, len(found))):
            launcher = asm.bind(solution, shape, device)
            assert isinstance(launcher, Launcher), launcher
            first = launcher.call(*given)
            assert fault(first, given, shape) == "", (shape, solution)
            assert all(torch.equal(first, launcher.call(*given)) for _ in range(20)), (shape, solution)

    assert not failing(check, itertools.product(range(40)))


def test_blocks_that_fit_and_more(device: Device, nan_first: None, failing: Any) -> None:
    """Grids for fewer or many more multiprocessors compute the product."""

    def check(kind: str, multiprocessors: int) -> None:
        shape, config = KINDS[kind]
        given = operands(shape, device)
        launcher = bound(config, shape, attrs.evolve(device, cu_num=multiprocessors))
        first = launcher.call(*given)
        assert fault(first, given, shape) == ""
        assert all(torch.equal(first, launcher.call(*given)) for _ in range(50))

    assert not failing(check, itertools.product(KINDS, [1, 7, 100, 264, 1000]))


def test_a_thousand_calls_have_the_same_bits(device: Device, failing: Any) -> None:
    """A thousand calls have the same bits."""

    def check(kind: str) -> None:
        shape, config = KINDS[kind]
        launcher, given = bound(config, shape, device), operands(shape, device)
        first = launcher.call(*given)
        assert fault(first, given, shape) == ""
        different = torch.zeros((), dtype=torch.int64, device=device.torch_device)
        for _ in range(1000):
            different += (launcher.call(*given).view(torch.int16) != first.view(torch.int16)).sum()
        assert different.item() == 0

    assert not failing(check, itertools.product(KINDS))


def test_a_graph_reads_new_inputs(device: Device, failing: Any) -> None:
    """A replayed graph reads new inputs, and counters return to zero."""

    def check(kind: str) -> None:
        (shape, config), graph = KINDS[kind], torch.cuda.CUDAGraph()
        launcher, given = bound(config, shape, device), operands(shape, device)
        launcher.call(*given)
        with torch.cuda.graph(graph):
            first, second = launcher.call(*given), launcher.call(*given)
        for seed in range(1, 4):
            given[0].copy_(operands(shape, device, seed)[0])
            graph.replay()
            torch.cuda.synchronize()
            assert fault(first, given, shape) == ""
            assert torch.equal(first, second)

    assert not failing(check, itertools.product(KINDS))


@pytest.mark.parametrize("pair", [("plain", "turns"), ("swapped", "blocks"), ("turns cluster", "two blocks an SM")], ids=str)
def test_graphs_on_two_streams_have_the_same_bits(pair: tuple[str, str], device: Device) -> None:
    """Ten thousand replays on two streams have the same bits while copies delay loads."""
    chance, replays, kept = random.Random(0), [], []
    copied = torch.zeros(1 << 28, dtype=torch.uint8, device=device.torch_device)
    for kind in pair:
        shape, config = KINDS[kind]
        launcher, given = bound(config, shape, device), operands(shape, device)
        first, different = launcher.call(*given).clone(), torch.zeros((), dtype=torch.int64, device=device.torch_device)
        assert fault(first, given, shape) == ""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device.torch_device)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(LAUNCHES):
                different += (launcher.call(*given) != first).sum()
        replays.append((graph, stream, different))
        kept += [given, first]  # whose addresses the graph has
    beside = torch.cuda.Stream(device.torch_device)
    for number in range(REPLAYS):
        for graph, stream, _ in replays:
            with torch.cuda.stream(stream):
                graph.replay()
        if number % 8 == 0:
            with torch.cuda.stream(beside):
                size = chance.randint(1, 1 << chance.randint(12, 27))
                copied[:size].copy_(copied[-size:])
        if number % 500 == 499:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    assert [different.item() for *_, different in replays] == [0, 0]
