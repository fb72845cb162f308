"""Experts over the installed library on a Hopper GPU: numbers, graphs, streams, launches, memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tunedgemm.plugin import Launcher, Shape, Solution, device_of
from tunedgemm.testing.launching import bind_launcher, draw_operands, fault_of, poisoned_output
from tunedgemm.testing.sharing import differing_calls, fault_of_graphs
from tunedgemm.tools.tables import op_named
from tunedgemm_deepgemm import deepgemm
from tunedgemm_deepgemm.experts.plan import plan_of
from tunedgemm_deepgemm.names import parse_name, unfit

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("no Hopper GPU found", allow_module_level=True)
pytestmark = pytest.mark.gpu

GPU, OP = device_of(torch.cuda.current_device()), op_named("fmoe")
WORDS = {"act_type": "Silu", "q_type": "per_1x128", "q_dtype_a": "fp8_e4m3fn", "q_dtype_w": "fp8_e4m3fn", "use_g1u1": "1", "layout": "row"}


def experts(tokens: int, model_dim: int, inter_dim: int, count: int, topk: int, **cells: str) -> Shape:
    sizes = {"token": tokens, "model_dim": model_dim, "inter_dim": inter_dim, "expert": count, "topk": topk}
    return OP.columns.parse({**{name: str(size) for name, size in sizes.items()}, **WORDS, **cells})


#: DeepSeek-V3 at TP 8 by tokens, then small ones with tails in all sizes.
DEEPSEEK = {tokens: experts(tokens, 7168, 256, 256, 8) for tokens in (1, 64, 512, 4096)}
ODD = (
    experts(1, 256, 128, 4, 2),
    experts(9, 208, 144, 5, 3, doweight_stage1="1"),
    experts(37, 1424, 1168, 3, 3, dtype="fp16"),
    experts(700, 528, 80, 33, 7, expert_parallel="True", outdtype="fp16"),  # two segments of pairs
    experts(16, 2048, 768, 128, 8),
    experts(64, 208, 144, 16, 4),
)
CASES = [("native", shape) for shape in DEEPSEEK.values()] + [("m64", DEEPSEEK[tokens]) for tokens in (64, 512, 4096)]
CASES += [("m16", DEEPSEEK[tokens]) for tokens in (1, 64, 512)] + [("m32", DEEPSEEK[64])]
CASES += [(name, shape) for shape in ODD for name in ("native", "m64", "m32", "m16", "masked", "m16_n64_pdl", "m16_spill")]
CASES += [("spill", DEEPSEEK[4096]), ("m64_spill", DEEPSEEK[4096]), ("spill", DEEPSEEK[512])]
CASES = [(name, shape) for name, shape in CASES if not unfit(parse_name(name), shape, GPU)]


if answer := deepgemm.refusal(ODD[0], GPU):
    pytest.skip(f"deepgemm: {answer}", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def compiled(kept_cache: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Compile all kernels of this file together, into a cache for the session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNEDGEMM_CACHE", kept_cache or str(tmp_path_factory.mktemp("deepgemm-experts")))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda case: deepgemm.prepare(Solution("deepgemm", case[0]), case[1], GPU), CASES))
        yield os.environ["TUNEDGEMM_CACHE"]


@pytest.fixture(autouse=True)
def in_cache(compiled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the session's cache in each test."""
    monkeypatch.setenv("TUNEDGEMM_CACHE", compiled)


def bound(name: str, shape: Shape) -> Launcher:
    return bind_launcher(deepgemm, Solution("deepgemm", name), shape, GPU)


@pytest.mark.parametrize("shape", [*DEEPSEEK.values(), *ODD], ids=str)
def test_outputs_are_right_and_repeat(shape: Shape) -> None:
    """Outputs in poisoned memory are right for each solution, and their bits repeat."""
    given = draw_operands(shape, GPU)
    for name in [name for name, other in CASES if other == shape]:
        launcher = bound(name, shape)
        assert not (fault := fault_of(shape, poisoned_output(launcher, given), given)), f"{name}: {fault}"
        assert not differing_calls(launcher, given, 20), f"{name} {shape}"


@pytest.mark.parametrize("name", ["native", "m64", "m16", "masked", "m16_n64_pdl", "spill", "m16_spill"])
@pytest.mark.parametrize("shape", [ODD[1], ODD[4], ODD[5], DEEPSEEK[64], DEEPSEEK[512]], ids=str)
def test_graphs_on_two_streams_follow_the_routing(name: str, shape: Shape) -> None:
    """Each replay on two streams has the bits of a plain call, with any routing and unknown experts."""
    if (name, shape) not in CASES:
        pytest.skip(f"{name} is not among the cases")
    launcher, count = bound(name, shape), int(shape["expert"])
    first, given = draw_operands(shape, GPU), []
    for seed in range(4):
        torch.manual_seed(seed)
        ids = torch.randint(-2, count + 2, first[4].shape, dtype=torch.int32, device=first[4].device)
        if seed == 2:  # as even as can be, which fills most blocks
            ids = torch.arange(ids.numel(), dtype=torch.int32, device=ids.device).remainder_(count - 1).view_as(ids)
        given.append((*first[:4], ids.fill_(count - 1) if seed == 3 else ids, *first[5:]))
    for operands in given:
        assert not (fault := fault_of(shape, launcher.call(*operands), operands)), fault
    assert not (fault := fault_of_graphs(launcher, given, replays=24)), fault


@pytest.mark.parametrize(
    ("name", "shape", "launches"),
    [("native", DEEPSEEK[4096], 7), ("spill", DEEPSEEK[4096], 9), ("m16", DEEPSEEK[64], 6), ("masked", ODD[4], 6)],
    ids=str,
)
def test_a_call_launches_few_kernels(name: str, shape: Shape, launches: int) -> None:
    """A call runs the steps of its plan and two products, and no copy, fill or transposition."""
    given, call = draw_operands(shape, GPU), bound(name, shape).call
    call(*given)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        call(*given)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(names) == launches == len(plan_of(shape, parse_name(name)).steps) + 2, names


def test_binding_allocates_no_weights() -> None:
    """The kernels are loaded over one expert's weight: an engine has no memory for another model's."""
    shape = DEEPSEEK[64]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, of_weights = torch.cuda.memory_allocated(), 256 * 2 * 256 * 7168
    launcher = bound("native", shape)
    assert torch.cuda.max_memory_allocated() - before < launcher.workspace_bytes + (64 << 20) < of_weights
