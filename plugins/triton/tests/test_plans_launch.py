"""Launching plans on a GPU: right answers, equal bits, graphs whose routing changes, given scales, threads with streams."""

from __future__ import annotations

import threading
from typing import Any

import attrs
import pytest
from tunedgemm.plugin import Device, Launcher, OutOfResources, Shape, Solution, device_of
from tunedgemm.tools import ops
from tunedgemm_triton import plan_launch
from tunedgemm_triton.planned import PLANNED

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]

EXAMPLES = [shape for op in PLANNED for shape in ops()[op].examples]
MOE = ops()["fmoe"].examples
#: Without quantisation, with one scale a tensor, and with scales of blocks: a few tokens each.
ROUTED = [MOE[2], MOE[6], MOE[11], MOE[14]]


@pytest.fixture
def device() -> Device:
    """The first GPU."""
    return device_of(0)


def _operands(shape: Shape, device: Device, seed: int = 0) -> tuple[Any, ...]:
    return ops()[shape.op].make_inputs(shape, device.torch_device, seed)


def _bound(solution: Solution, shape: Shape, device: Device) -> Launcher:
    launcher = plan_launch.bind(PLANNED[shape.op], solution, shape, device)
    assert isinstance(launcher, Launcher), launcher
    return launcher


def _supported(shape: Shape, device: Device) -> None:
    answer = PLANNED[shape.op].supports(shape, device)
    if not answer:
        pytest.skip(str(answer))


def _close(out: Any, shape: Shape, operands: tuple[Any, ...]) -> bool:
    op = ops()[shape.op]
    expected = op.reference(shape, operands).double()
    sizes = expected.norm(dim=1).clamp(min=1e-30)
    error = (out.reshape(expected.shape).double() - expected).norm(dim=1) / sizes
    return bool(error.max().item() < op.tolerance(shape).row_error)


@pytest.mark.parametrize("shape", EXAMPLES, ids=str)
def test_listed_solutions_are_right_and_repeat_their_bits(shape: Shape, device: Device) -> None:
    """What is listed binds or needs too much, matches the reference, and gives equal bits twice."""
    _supported(shape, device)
    operands, ran = _operands(shape, device), 0
    for solution in PLANNED[shape.op].enumerate_solutions(shape, device):
        try:
            launcher = plan_launch.bind(PLANNED[shape.op], solution, shape, device)
        except OutOfResources:
            continue
        assert isinstance(launcher, Launcher), launcher
        first, second = launcher.call(*operands), launcher.call(*operands)
        assert _close(first, shape, operands), solution
        assert torch.equal(first, second), solution
        ran += 1
    assert ran


@pytest.mark.parametrize("alone", [False, True], ids=["sorted", "alone"])
@pytest.mark.parametrize("shape", ROUTED, ids=str)
def test_a_captured_call_serves_another_routing_at_each_replay(shape: Shape, alone: bool, device: Device) -> None:
    """Nothing of the routing is in a graph: experts without tokens, ids of no expert and new hidden states stay right."""
    shape = attrs.evolve(shape, m=min(shape.m, 8))
    _supported(shape, device)
    listed = list(PLANNED["fmoe"].enumerate_solutions(shape, device))
    launcher = _bound(next(one for one in listed if PLANNED["fmoe"].kernel_of(one.kernel_name).alone is alone), shape, device)
    operands = _operands(shape, device)
    launcher.call(*operands)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launcher.call(*operands)
    for seed in range(1, 5):
        others = _operands(shape, device, seed)
        for place in (0, 3, 4):
            operands[place].copy_(others[place])
        if seed > 2:
            operands[4][:, 0] = 0
            operands[4][-1, -1] = int(shape["expert"])
        graph.replay()
        torch.cuda.synchronize()
        assert _close(out, shape, operands), seed


def test_given_scales_of_the_activations_are_used(device: Device) -> None:
    """per_Tensor takes its scales from the call where they are there, one or both, and from the values where not."""
    shape = MOE[6]
    _supported(shape, device)
    launcher, operands = _bound(Solution("triton", "auto"), shape, device), _operands(shape, device)
    one, other = (torch.tensor([value], device=device.torch_device) for value in (0.02, 0.05))
    for scales in ((one, other), (one, None), (None, other), (None, None), (one,)):
        assert _close(launcher.call(*operands, *scales), shape, (*operands, *scales)), scales


def test_many_pairs_are_sorted_by_several_programs(device: Device) -> None:
    """More pairs than one program looks at, most of them of one expert."""
    shape = attrs.evolve(MOE[2], m=5000)
    launcher, operands = _bound(Solution("triton", "auto"), shape, device), _operands(shape, device)
    operands[4][100:4000, 0] = 5
    assert _close(launcher.call(*operands), shape, operands)


@pytest.mark.parametrize("kind", ["mx, split", "moe, split", "moe, joined"])
def test_threads_with_streams_of_their_own_share_a_launcher(kind: str, device: Device) -> None:
    """Four threads call one launcher with split or joined sums on four streams: every answer has the bits of a lone call."""
    shape = Shape("a4w4_blockscale", 16, 1280, 4096, dtype="fp4x2", outdtype="bf16", scale="block", layout="aiter16x16")
    shape = shape if kind == "mx, split" else attrs.evolve(MOE[2], m=2, n=2048)
    listed = PLANNED[shape.op].enumerate_solutions(shape, device)
    joined = kind == "moe, joined"
    solution = next(one for one in listed if ("_a" in one.kernel_name if joined else one.split_k > 1 and "_a" not in one.kernel_name))
    launcher = _bound(solution, shape, device)
    inputs = [_operands(shape, device, seed) for seed in range(4)]
    alone, wrong = [launcher.call(*operands) for operands in inputs], []
    torch.cuda.synchronize()

    def work(place: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            outs = [launcher.call(*inputs[place]) for _ in range(50)]
        stream.synchronize()
        wrong.extend(place for out in outs if not torch.equal(out, alone[place]))

    threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
