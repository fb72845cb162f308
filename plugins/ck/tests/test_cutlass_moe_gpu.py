"""Check fmoe by CUTLASS on a Hopper GPU."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import pytest
import torch
from tunedgemm.plugin import Device, Launcher, Shape, Solution, device_of
from tunedgemm.testing.conformance import Poisoned
from tunedgemm.testing.launching import output_fault
from tunedgemm.tools import op_named
from tunedgemm_ck import cutlass

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("no Hopper GPU found", allow_module_level=True)
pytestmark = pytest.mark.gpu

OP = op_named("fmoe")


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


@pytest.fixture(autouse=True)
def compiling(monkeypatch: pytest.MonkeyPatch, kept_cache: str) -> None:
    """Allow compilation, into a cache that all tests share."""
    if kept_cache:
        monkeypatch.setenv("TUNEDGEMM_CACHE", kept_cache)
    else:
        monkeypatch.delenv("TUNEDGEMM_CACHE")
    monkeypatch.setenv("TUNEDGEMM_CK_COMPILE", "1")


@pytest.fixture(scope="module")
def device() -> Device:
    """Return the first GPU."""
    return device_of(0)


def few(kind: Shape, device: Device) -> list[Solution]:
    """Return the best guesses for few tokens, which swap operands, and for many, which do not."""
    few_, many = (list(cutlass.enumerate_solutions(attrs.evolve(kind, m=m), device)) for m in (16, 16384))
    assert few_, cutlass.details(device)
    plain = [solution for solution in many if "_swap" not in solution.kernel_name]
    return list(dict.fromkeys([*few_[:FEW], *plain[:1]]))


def bound(solution: Solution, shape: Shape, device: Device) -> Launcher:
    answer = cutlass.bind(solution, shape, device)
    assert isinstance(answer, Launcher), f"{solution}: {answer}"
    return answer


def operands(shape: Shape, device: Device, seed: int = 0) -> tuple[Any, ...]:
    return OP.make_inputs(shape, device.torch_device, seed)


def wrong(out: torch.Tensor, shape: Shape, given: tuple[Any, ...]) -> str:
    """Return an output's fault by the op's tolerance, or ""."""
    return output_fault(shape, out, OP.reference(shape, given))


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
            launcher, random = bound(solution, shape, device), operands(shape, device)
            for name, ids in routings(random[4], 16):
                given = (*random[:4], ids, *random[5:])
                with Poisoned() as poisoned:
                    out = launcher.call(*given)
                torch.cuda.synchronize()
                label = f"{solution}, {m} tokens, {name}"
                assert not poisoned.overwritten(), label
                if name == "no pair at all":
                    assert not out.any(), label
                else:
                    assert not wrong(out, shape, given), f"{label}: {wrong(out, shape, given)}"
                assert all(torch.equal(launcher.call(*given), out) for _ in range(20)), label


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind["q_type"] == "per_Tensor"], ids=str)
def test_static_scales_are_taken(kind: Shape, device: Device) -> None:
    """a1_scale and a2_scale are applied, each alone and together."""
    one, other = (torch.tensor([value], device=device.torch_device) for value in (0.03, 0.05))
    for solution in few(kind, device)[:1]:
        launcher, given = bound(solution, kind, device), operands(kind, device)
        for static in ((one, None), (None, other), (one, other)):
            out = launcher.call(*given, *static)
            assert not wrong(out, kind, (*given, *static)), f"{solution}: {wrong(out, kind, (*given, *static))}"


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_pairs_of_any_stages_go_together(kind: Shape, device: Device) -> None:
    """A stage compiled for one pair serves in another."""
    solutions = few(kind, device)
    firsts, seconds = zip(*(solution.kernel_name.split("+") for solution in solutions), strict=True)
    given = operands(kind, device)
    for first, second in zip(firsts, reversed(seconds), strict=True):
        solution = Solution("cutlass", f"{first}+{second}")
        out = bound(solution, kind, device).call(*given)
        assert not wrong(out, kind, given), f"{solution}: {wrong(out, kind, given)}"


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_graphs_on_two_streams_read_new_inputs(kind: Shape, device: Device) -> None:
    """Each replay on two streams has the bits of a plain call, also with new routing."""
    for solution in few(kind, device):
        launcher, streams, graphs = bound(solution, kind, device), [torch.cuda.Stream() for _ in range(2)], []
        wanted = {seed: launcher.call(*operands(kind, device, seed)).clone() for seed in range(3)}
        for stream in streams:
            given, graph = operands(kind, device), torch.cuda.CUDAGraph()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.graph(graph, stream=stream):
                out = launcher.call(*given)
            graphs.append((stream, graph, given, out))
        torch.cuda.synchronize()
        for replay in range(60):
            for place, (stream, graph, given, _) in enumerate(graphs):
                with torch.cuda.stream(stream):
                    for mine, fresh in zip(given, operands(kind, device, (replay + place) % 3), strict=True):
                        mine.copy_(fresh)
                    graph.replay()
            if replay % 20 == 19:
                torch.cuda.synchronize()
                for place, (*_, out) in enumerate(graphs):
                    assert torch.equal(out, wanted[(replay + place) % 3]), f"{solution}, replay {replay}"


def test_threads_share_a_launcher(device: Device) -> None:
    """Four threads with separate operands and streams share a launcher."""
    shape = KINDS[0]
    for solution in few(shape, device):
        launcher, faults = bound(solution, shape, device), []

        def run(seed: int, launcher: Launcher = launcher, faults: list[str] = faults) -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                given = operands(shape, device, seed)
                outs = [launcher.call(*given) for _ in range(30)]
                torch.cuda.current_stream().synchronize()
                faults.extend(filter(None, (wrong(out, shape, given) for out in outs[::10])))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(run, range(4)))  # raises what a thread raised
        assert not faults, f"{solution}: {faults[0]}"


@pytest.mark.parametrize("sizes", [(7168, 256, 256, 8, 64), (4096, 1792, 8, 2, 4096), (128, 64, 1024, 8, 131072)], ids=str)
def test_sizes_of_models_and_beyond_are_right(sizes: tuple[int, int, int, int, int], device: Device) -> None:
    """Many experts, many rows per expert, and 2^20 pairs over 1024 experts are right."""
    n, k, experts, topk, m = sizes
    extra = {**dict(KINDS[0].extra), "expert": experts, "topk": topk}
    shape = attrs.evolve(KINDS[0], m=m, n=n, k=k, extra=extra)
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("too little GPU memory")
    given = operands(shape, device)
    for solution in list(cutlass.enumerate_solutions(shape, device))[:1]:
        out = bound(solution, shape, device).call(*given)
        assert not wrong(out, shape, given), f"{solution}: {wrong(out, shape, given)}"
