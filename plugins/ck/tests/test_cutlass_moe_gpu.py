"""Check fmoe by CUTLASS on a Hopper GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch
from tunedgemm.plugin import Device, Shape, Solution
from tunedgemm.testing.launching import bind_launcher, draw_operands, fault_of, poisoned_output
from tunedgemm.testing.sharing import differing_calls
from tunedgemm_ck import cutlass

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("no Hopper GPU found", allow_module_level=True)
#: An instance compiles for up to a minute.
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.usefixtures("compiling")]


def _shape(kind: str, q_dtype: str, act: str = "silu", n: int = 512, k: int = 352, **fields: Any) -> Shape:
    """Return 16 tokens to 4 of 16 experts; *fields* may also set g1u1 and doweight_stage1."""
    flags = {name: fields.pop(name, default) for name, default in (("g1u1", True), ("doweight_stage1", False))}
    extra = {"expert": 16, "topk": 4, "act": act, "q_dtype_a": q_dtype, "q_dtype_w": q_dtype, "q_type": kind, **flags}
    return Shape("fmoe", 16, n, k, **fields, extra=extra)


#: One of each kind of factors, with tails in K and in the rows of the weight.
KINDS = [
    _shape("No", "bf16"),
    _shape("No", "fp16", "gelu", dtype="fp16", outdtype="fp16", g1u1=False),
    _shape("per_Tensor", "fp8_e4m3fn", "swiglu"),
    _shape("per_Tensor", "int8", doweight_stage1=True),
    _shape("per_Token", "fp8_e4m3fn", "gelu"),
    _shape("per_Token", "int8", g1u1=False, doweight_stage1=True),
    _shape("per_1x128", "fp8_e4m3fn", n=640),
    _shape("per_1x128", "fp8_e4m3fn", "swiglu", dtype="fp16", outdtype="bf16", k=256),
]
TOKENS = (1, 16, 300)
#: Pairs of a kind that are launched: a compilation of each stage takes up to two minutes.
FEW = 2


def few(kind: Shape, device: Device) -> list[Solution]:
    """Return the best guesses for few tokens, which swap operands, and for many, which do not."""
    few_, many = (list(cutlass.solutions(attrs.evolve(kind, m=m), device)) for m in (16, 16384))
    assert few_, cutlass.details(device)
    plain = [solution for solution in many if "_swap" not in solution.kernel_name]
    return list(dict.fromkeys([*few_[:FEW], *plain[:1]]))


def routings(ids: torch.Tensor, experts: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the random routing and awkward ones."""
    yield "random", ids
    one = torch.full_like(ids, experts - 1)
    yield "all pairs to one expert", one
    half = ids % 2 * (experts - 1)
    yield "two experts", half
    outside = ids.clone()
    # Keep a token's first expert: without its largest weight the static scale dominates.
    outside[::2, 1], outside[1::3, -1], outside[-1] = -1, experts, 1 << 30
    yield "ids of no expert", outside
    yield "no pair at all", torch.full_like(ids, -1)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_any_routing_is_right_and_repeats_its_bits(kind: Shape, device: Device) -> None:
    """Every routing is right and repeats its bits; tokens without an expert get zeros."""
    for solution in few(kind, device):
        for m in TOKENS:
            shape = attrs.evolve(kind, m=m)
            launcher, random = bind_launcher(cutlass, solution, shape, device), draw_operands(shape, device)
            for name, ids in routings(random[4], 16):
                given = (*random[:4], ids, *random[5:])
                out, label = poisoned_output(launcher, given), f"{solution}, {m} tokens, {name}"
                if name == "no pair at all":
                    assert not out.any(), label
                else:
                    assert not (fault := fault_of(shape, out, given)), f"{label}: {fault}"
                assert not differing_calls(launcher, given, 20), label


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind["q_type"] == "per_Tensor"], ids=str)
def test_static_scales_are_taken(kind: Shape, device: Device) -> None:
    """a1_scale and a2_scale are applied, each alone and together."""
    one, other = (torch.tensor([value], device=device.torch_device) for value in (0.03, 0.05))
    for solution in few(kind, device)[:1]:
        launcher, given = bind_launcher(cutlass, solution, kind, device), draw_operands(kind, device)
        for static in ((one, None), (None, other), (one, other)):
            out = launcher.call(*given, *static)
            assert not (fault := fault_of(kind, out, (*given, *static))), f"{solution}: {fault}"


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_pairs_of_any_stages_go_together(kind: Shape, device: Device) -> None:
    """A stage compiled for one pair serves in another."""
    solutions = few(kind, device)
    firsts, seconds = zip(*(solution.kernel_name.split("+") for solution in solutions), strict=True)
    given = draw_operands(kind, device)
    for first, second in zip(firsts, reversed(seconds), strict=True):
        solution = Solution("cutlass", f"{first}+{second}")
        out = bind_launcher(cutlass, solution, kind, device).call(*given)
        assert not (fault := fault_of(kind, out, given)), f"{solution}: {fault}"


@pytest.mark.parametrize("sizes", [(7168, 256, 256, 8, 64), (4096, 1792, 8, 2, 4096), (128, 64, 1024, 8, 131072)], ids=str)
def test_sizes_of_models_and_beyond_are_right(sizes: tuple[int, int, int, int, int], device: Device) -> None:
    """Many experts, many rows per expert, and 2^20 pairs over 1024 experts are right."""
    n, k, experts, topk, m = sizes
    extra = {**dict(KINDS[0].extra), "expert": experts, "topk": topk}
    shape = attrs.evolve(KINDS[0], m=m, n=n, k=k, extra=extra)
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("too little GPU memory")
    given = draw_operands(shape, device)
    for solution in list(cutlass.solutions(shape, device))[:1]:
        out = bind_launcher(cutlass, solution, shape, device).call(*given)
        assert not (fault := fault_of(shape, out, given)), f"{solution}: {fault}"
