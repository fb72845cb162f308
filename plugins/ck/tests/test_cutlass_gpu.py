"""Check CUTLASS's instances on a Hopper or Blackwell GPU."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
import torch
from tunedgemm.plugin import Device, Launcher, Shape, Solution
from tunedgemm.testing.launching import bind_launcher, draw_operands, fault_of, poisoned_output
from tunedgemm.testing.sharing import differing_calls
from tunedgemm_ck import cutlass

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("no Hopper or Blackwell GPU found", allow_module_level=True)
#: An instance compiles for up to a minute.
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.usefixtures("compiling")]

#: One of each kind of operands and output.
KINDS = [
    Shape("a16w16", 300, 456, 1000),
    Shape("a16w16", 77, 520, 1032, dtype="fp16", outdtype="fp32", epilogue="bias"),
    Shape("a8w8", 300, 464, 1008, "fp8_e4m3fn", "bf16", "bias", scale="row"),
    Shape("a8w8", 65, 464, 1008, "int8", "fp16", scale="row"),
    Shape("a8w8", 300, 464, 1008, "fp8_e4m3fn", "bf16", scale="tensor"),
    Shape("a8w8_blockscale", 300, 456, 1024, "fp8_e4m3fn", "bf16", scale="block"),
    Shape("batched_bf16", 70, 136, 264, extra={"B": 3}, epilogue="bias"),
    Shape("batched_a8w8", 70, 144, 272, "int8", "bf16", scale="row", extra={"B": 3}),
]
#: Instances of a kind that are launched: a compilation takes up to a minute.
FEW = 3
#: Sizes of random products of a kind.
DRAWN = 12


def few(shape: Shape, device: Device) -> list[Solution]:
    """Return the first solutions of a shape, and the first of each kind of kernel."""
    listed = list(cutlass.solutions(shape, device))
    assert listed, cutlass.details(device)
    ways: dict[tuple[bool, ...], Solution] = {}
    for solution in listed:
        name = solution.kernel_name
        ways.setdefault((solution.split_k > 1, *(way in name for way in ("_swap", "streamk", "cooperative", "2sm", "_fast"))), solution)
    return list(dict.fromkeys([*listed[:FEW], *ways.values()]))


@pytest.mark.parametrize("shape", KINDS, ids=str)
def test_listed_instances_are_right_and_repeat_their_bits(shape: Shape, device: Device) -> None:
    """Outputs in poisoned memory are right, nothing else is written, and bits repeat."""
    given = draw_operands(shape, device)
    for solution in few(shape, device):
        launcher = bind_launcher(cutlass, solution, shape, device)
        assert not (fault := fault_of(shape, poisoned_output(launcher, given), given)), f"{solution}: {fault}"
        assert not differing_calls(launcher, given, 100), solution


def _drawn(kind: Shape) -> Iterator[Shape]:
    """Yield random sizes of a kind, with tails in all dimensions."""
    draw = random.Random(str(kind))
    step = {"bf16": 8, "fp16": 8}.get(kind.dtype, 16)
    for _ in range(DRAWN):
        m, n, k = draw.choice((1, 3, 16, 64, 129, 1000)), 16 * draw.randint(1, 200), step * draw.randint(1, 300)
        extra = {"B": draw.randint(1, 5)} if kind.extra else {}
        yield Shape(kind.op, m, n, k, kind.dtype, kind.outdtype, kind.epilogue, kind.bias_dtype, kind.scale, extra=extra)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_random_products_are_right(kind: Shape, device: Device) -> None:
    """Instances are right on sizes that they were not listed for."""
    chosen, launched = few(kind, device), set()
    for shape in _drawn(kind):
        given = draw_operands(shape, device)
        for solution in chosen:
            answer = cutlass.bind(solution, shape, device)
            if isinstance(answer, Launcher):
                launched.add(solution)
                assert not (fault := fault_of(shape, answer.call(*given), given)), f"{solution} on {shape}: {fault}"
    assert {solution for solution in chosen if solution.split_k < 2} <= launched  # K in parts may be too short for some


@pytest.mark.parametrize("sizes", [(70_000, 33_024, 64), (16, 40_000, 65_536), (33_024, 64, 70_000)], ids=str)
def test_operands_of_over_two_to_the_31_elements(sizes: tuple[int, int, int], device: Device) -> None:
    """Outputs, weights and x of more than 2^31 elements are right at the far end."""
    m, n, k = sizes
    shape = Shape("a16w16", m, n, k)
    if torch.cuda.mem_get_info()[0] < 4 * (math.prod((m, n)) + m * k + n * k) + 2**30:
        pytest.skip("too little GPU memory")
    x, weight = (torch.randn(rows, k, device=device.torch_device, dtype=torch.bfloat16) for rows in (m, n))
    for solution in few(shape, device):
        out = bind_launcher(cutlass, solution, shape, device).call(x, weight)
        for rows in (slice(0, 4), slice(m - 4, m)):
            wanted = x[rows].float() @ weight.float().t() if n * k < 2**31 else (x[rows] @ weight.t()).float()
            error = (out[rows].float() - wanted).norm() / wanted.norm()
            assert error < 2**-6, f"{solution}: rows {rows} are off by {error:.3g}"
