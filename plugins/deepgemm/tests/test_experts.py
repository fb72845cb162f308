"""Experts: plans, kernels in Triton's interpreter, routings, limits, compilation ahead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from tunedgemm.plugin import Device, Launcher, Shape, Solution, device_of
from tunedgemm.tools.tables import op_named
from tunedgemm_deepgemm import deepgemm, launch, limits
from tunedgemm_deepgemm.experts.plan import plan_of
from tunedgemm_deepgemm.experts.steps import TritonSteps, compile_program
from tunedgemm_deepgemm.names import expert_rows, parse_name, usual_rows
from tunedgemm_deepgemm.product import GROUPED

CPU, H200 = device_of(-1), Device("sm_90", 132, "nvidia-h200")
SIZES = {"token": "6", "model_dim": "208", "inter_dim": "144", "expert": "4", "topk": "3"}
WORDS = {"act_type": "Silu", "q_type": "per_1x128", "q_dtype_a": "fp8_e4m3fn", "q_dtype_w": "fp8_e4m3fn", "use_g1u1": "1", "layout": "row"}
KERNELS = ("native", "m64", "m16", "masked")
#: 15 experts with a pair more than a block of 16, of 64 tokens: 31 blocks, usually 26.
UNEVEN = torch.tensor([expert for expert in range(15) for _ in range(17)] + [15]).view(64, 4).tolist()
SPILLING = {"token": "64", "expert": "16", "topk": "4"}
ROUTINGS = {
    "spread": [[0, 1, 2]] * 6,
    "one": [[3, 3, 3]] * 6,
    "unknown": [[-1, 4, 2], [0, 1, 2], [-1, -1, -1], [4, 5, 2**31 - 1], [-(2**31), 3, 0], [1, 1, -7]],
    "none": [[-1, -1, -1]] * 6,
}


def shape_of(**cells: str) -> Shape:
    """Return a shape of experts that are served, apart from *cells*."""
    return op_named("fmoe").columns.parse({**SIZES, **WORDS, **cells})


def bound(backend: Any, shape: Shape, name: str) -> Launcher:
    """Compile ahead, and bind."""
    solution = Solution(backend.libtype, name)
    backend.prepare(solution, shape, CPU)
    answer = backend.bind(solution, shape, CPU)
    assert isinstance(answer, Launcher), answer
    return answer


@pytest.mark.parametrize("name", KERNELS)
def test_routings(backend: Any, name: str) -> None:
    """Unknown experts add nothing, whatever their weight, and experts may repeat in a token."""
    shape = shape_of()
    call = bound(backend, shape, name).call
    for ids in ROUTINGS.values():
        operands = list(op_named("fmoe").make_inputs(shape, torch.device("cpu"), 0))
        operands[4] = torch.tensor(ids, dtype=torch.int32)
        known = (operands[4] >= 0) & (operands[4] < 4)
        operands[3][~known] = torch.nan
        out = call(*operands)
        operands[3][~known] = 0.0
        exact = op_named("fmoe").reference(shape, tuple(operands)).float()
        assert out.shape == (6, 208) and out.dtype is torch.bfloat16
        assert (out.float() - exact).norm() <= 0.06 * exact.norm()
        assert not out[~known.any(1)].any()


def case(kernel: str, ids: str = "", **cells: str) -> dict[str, Any]:
    """Return a case of `interpreted_experts`."""
    return {"kernel": kernel, "cells": {**SIZES, **WORDS, **cells}, **({"ids": ROUTINGS[ids]} if ids else {})}


def test_spilled_rows(backend: Any) -> None:
    """Rows beyond those of a usual routing have the same results as rows of the library."""
    shape = shape_of(**SPILLING)
    operands = list(op_named("fmoe").make_inputs(shape, torch.device("cpu"), 0))
    calls = [bound(backend, shape, name).call for name in ("m16", "m16_spill")]
    for ids in (operands[4], torch.tensor(UNEVEN, dtype=torch.int32), torch.full((64, 4), 3, dtype=torch.int32)):
        operands[4] = ids
        wanted, spilled = (call(*operands) for call in calls)
        assert torch.allclose(wanted.float(), spilled.float(), rtol=1e-2, atol=1e-2)
    plan = plan_of(shape, parse_name("m16_spill"))
    assert (plan.rows, *(product.m for product in plan.products)) == (31 * 16, 26 * 16, 26 * 16)


INTERPRETED = (
    *(case(kernel, ids) for kernel in KERNELS for ids in ("one", "unknown", "none")),
    case("native", token="4", model_dim="1424", inter_dim="1168", expert="3", topk="2", doweight_stage1="1"),
    case("m32", token="5", model_dim="128", inter_dim="272", expert="6", topk="6", dtype="fp16", outdtype="bf16"),
    case("masked", token="3", model_dim="16", inter_dim="16", expert="40", topk="1", doweight_stage1="1", outdtype="fp16"),
    {**case("m16_spill", **SPILLING, model_dim="144"), "ids": UNEVEN},
    {**case("m16_spill", **SPILLING, inter_dim="16"), "ids": UNEVEN},
)
CROWDED = (
    {**case("m16", token="1500", expert="5"), "random_ids": True},  # 4500 pairs: two segments
    {**case("masked", token="100", expert="300", topk="7"), "random_ids": True},
    {**case("native", token="9000", expert="33", topk="8"), "random_ids": True},  # 72000 pairs: two reads of counts
)


@pytest.mark.interpreter
@pytest.mark.parametrize("cases", [INTERPRETED, pytest.param(CROWDED, marks=pytest.mark.nightly)], ids=["corners", "many pairs"])
def test_kernels_in_the_interpreter(tmp_path: Path, cases: tuple[dict[str, Any], ...]) -> None:
    """Places equal those of torch, and whole calls in poisoned memory the reference."""
    environment = {"TRITON_INTERPRET": "1", "DG_JIT_CACHE_DIR": str(tmp_path), "DG_JIT_NVCC_COMPILER": "/bin/sh"}
    command = [sys.executable, str(Path(__file__).with_name("interpreted_experts.py"))]
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, env={**os.environ, **environment}, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    for given, shown in zip(cases, json.loads(done.stdout), strict=True):
        assert not shown["misplaced"] and not shown.get("overwritten"), (given, shown)
        assert shown.get("empty", True) and shown.get("error", 0.0) <= shown.get("bound", 0.0), (given, shown)


@pytest.mark.parametrize(("name", "tokens"), [("native", "3"), ("m16", "3000"), ("masked", "3"), ("spill", "3000"), ("m64_spill", "3000")])
def test_programs_compile_for_hopper(cache: Path, name: str, tokens: str) -> None:
    """Triton compiles each program without a device, without spills, and only once."""
    plan = plan_of(shape_of(token=tokens, model_dim="7168", inter_dim="256", expert="256", topk="8"), parse_name(name))
    assert len(plan.steps) == 4 + 1 * (tokens == "3000") + 2 * ("spill" in name)
    for step in plan.steps:
        kernel = compile_program(step.program, H200)
        assert kernel.metadata.shared <= 48 << 10 or step in plan.spills
        assert ".local" not in kernel.asm["ptx"]
    steps = TritonSteps()
    assert not steps.are_compiled(plan, H200)
    steps.prepare(plan, H200)
    assert steps.are_compiled(plan, H200)
    assert not steps.are_compiled(plan, attrs.evolve(H200, gfx="sm_89"))


@pytest.mark.parametrize(
    ("tokens", "experts", "topk", "name", "rows"),
    [
        (1, 256, 8, "native", 8 * 128),
        (64, 256, 8, "native", (256 + 2) * 128),
        (64, 256, 8, "m16", (256 + 16) * 16),
        (4096, 256, 8, "native", (256 + 254) * 128),
        (4, 8, 2, "masked", 128),
        (100, 1, 1, "m64", 128),
    ],
)
def test_rows_suffice_for_any_routing(tokens: int, experts: int, topk: int, name: str, rows: int) -> None:
    """The rows of the products are those of the worst routing, and no more."""
    shape, kernel = shape_of(token=str(tokens), expert=str(experts), topk=str(topk)), parse_name(name)
    assert expert_rows(shape, kernel) == rows
    if not kernel.masked:
        pairs, size = tokens * topk, kernel.expert_rows
        hit = min(experts, pairs)
        worst = [1] * (hit - 1) + [pairs - hit + 1]
        assert sum(-(-count // size) * size for count in worst) == rows


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"q_type": "per_Token"}, "(got fp8_e4m3fn, per_Token, silu, gated)"),
        ({"q_dtype_w": "fp8_e4m3fnuz", "q_dtype_a": "fp8_e4m3fnuz"}, "(got fp8_e4m3fnuz, per_1x128, silu, gated)"),
        ({"act_type": "Gelu"}, "(got fp8_e4m3fn, per_1x128, gelu, gated)"),
        ({"use_g1u1": "0"}, "(got fp8_e4m3fn, per_1x128, silu, not gated)"),
        ({"q_dtype_a": "bf16"}, "fmoe has no activations of bf16 and weights of fp8_e4m3fn"),
        ({"options": "quantised"}, "fmoe has no quantised"),
        ({"expert": "1025"}, "fmoe: expert must be in 1..1024 (got 1025)"),
        ({"topk": "33"}, "fmoe: topk must be in 1..32 (got 33)"),
        ({"inter_dim": "72"}, "fmoe: model_dim and inter_dim must be multiples of 16 (got 208 and 72)"),
        ({"layout": "aiter16x16", "model_dim": "256", "inter_dim": "160"}, "weight layout must be row (got 'aiter16x16')"),
    ],
)
def test_reasons(cells: dict[str, str], reason: str) -> None:
    """Each limit gives the value it found; the shape without the change is served."""
    for served in ({}, {"doweight_stage1": "1"}, {"expert_parallel": "True"}, {"token": "0"}, {"dtype": "fp16"}):
        assert not limits.unsupported(shape_of(**served), H200)
    assert str(limits.unsupported(shape_of(**cells), H200)).endswith(reason)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("m128", "rows of a block of experts must be 16, 32, 64, or left out (got 128)"),
        ("m48", "rows of a block of experts must be 16, 32, 64, or left out (got 48)"),
        ("n176", "block N with block scales must be at most 128, or one of 144, 160, 192 (got 176)"),
    ],
)
def test_unfit_names_are_refused(name: str, reason: str) -> None:
    """`lacks` has the reason; other ops have no rows of experts."""
    assert reason in deepgemm.lacks(Solution("deepgemm", name), shape_of(), H200)
    dense = Shape("a16w16", 64, 256, 256)
    assert "rows of experts apply to fmoe" in deepgemm.lacks(Solution("deepgemm", "m64"), dense, H200)
    assert "rows of experts apply to fmoe" in deepgemm.lacks(Solution("deepgemm", "masked"), dense, H200)


@pytest.mark.parametrize(
    ("tokens", "name", "usual"), [(4096, "native", 416), (1024, "native", 262), (2048, "m64", 416), (1, "native", 8), (8192, "native", 672)]
)
def test_usual_rows_suffice_for_even_routing(tokens: int, name: str, usual: int) -> None:
    """The blocks of a usual routing are enough for random experts, and fewer than the worst routing's."""
    shape, kernel = shape_of(token=str(tokens), expert="256", topk="8"), parse_name(name)
    assert usual_rows(shape, kernel) == usual * kernel.expert_rows
    torch.manual_seed(5)
    for _ in range(20):
        counts = torch.bincount(torch.rand(tokens, 256).topk(8).indices.flatten(), minlength=256)
        assert int((-(-counts // kernel.expert_rows)).sum()) <= usual


def test_spilling_is_listed_where_it_saves_rows() -> None:
    """Many tokens have it in the list; a shape whose usual routing is the worst one refuses it."""
    few, many = (shape_of(token=tokens, expert="256", topk="8") for tokens in ("1", "4096"))
    assert "spill" in [solution.kernel_name for solution in deepgemm.solutions(many, H200)]
    assert not [solution for solution in deepgemm.solutions(few, H200) if "spill" in solution.kernel_name]
    assert "a usual routing needs as many rows as any; leave spill out" in deepgemm.lacks(Solution("deepgemm", "spill"), few, H200)
    assert "none to spill" in deepgemm.lacks(Solution("deepgemm", "masked_spill"), few, attrs.evolve(H200))


def test_the_masked_layout_has_a_bound() -> None:
    """It is listed and served up to 256 MiB."""
    few, many = (shape_of(token=tokens, model_dim="2048", inter_dim="768", expert="128", topk="8") for tokens in ("16", "64"))
    names = [[solution.kernel_name for solution in deepgemm.solutions(shape, H200)] for shape in (few, many)]
    assert names[0][:6] == ["native", "m16", "m32", "m64", "masked", "m16_pdl"]
    assert not [name for name in names[1] if "masked" in name]
    reason = deepgemm.lacks(Solution("deepgemm", "masked"), many, H200)
    assert "the masked layout must need at most 256 MiB (got 624)" in reason


def test_neighbours_change_the_rows() -> None:
    """128 rows are the library's default, and have no name."""
    shape = shape_of(token="64")
    near = {name: [s.kernel_name for s in deepgemm.refine(Solution("deepgemm", name), shape, H200)] for name in ("m64", "native", "masked")}
    assert {"m32", "native"} <= set(near["m64"])
    assert "m64" in near["native"]
    assert not [name for name in near["masked"] if name.startswith("m") and "masked" not in name and name != "mnk"]


def test_settings_of_a_name(backend: Any, fake: ModuleType) -> None:
    """Each product has the rows, the block N and the SMs of its name, and other names leave none behind."""
    shape = shape_of()
    given = op_named("fmoe").make_inputs(shape, torch.device("cpu"), 0)
    calls = {name: bound(backend, shape, name).call for name in ("m16_n64_s100", "native")}
    (copy,) = fake.opened
    wanted = {"m16_n64_s100": (16, (100, False, (1, 64), "nk")), "native": (128, (132, False, (1, 1), "nk"))}
    for name in (*calls, *reversed(calls)):
        copy.calls.clear()
        calls[name](*given)
        assert (copy.expert_rows, *copy.calls) == (wanted[name][0], wanted[name][1], wanted[name][1])


def test_serving_never_compiles(backend: Any, cache: Path) -> None:
    """`bind` refuses while a kernel of the library or of Triton is missing, and says how to get it."""
    shape, solution = shape_of(), Solution(backend.libtype, "m64")
    assert "m64 for M=" in str(backend.bind(solution, shape, CPU))
    for target in launch.targets_of(backend.hooks.access, solution, shape, H200):
        launch.ensure_compiled(backend.hooks.access, target)
    assert "steps of " in str(backend.bind(solution, shape, CPU))
    assert isinstance(bound(backend, shape, "m64"), Launcher)
    log = (cache / "deepgemm" / "log").read_text().split("\n")
    assert [line for line in log if line] == [
        "kernel.contiguous64.0x288x208.132.1 described",
        "kernel.contiguous64.0x208x144.132.1 described",
    ]


def test_a_library_without_groups_is_refused(backend: Any, fake: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that the library lacks is named; its other products serve."""
    extension = sys.modules["fake_deepgemm.extension"].Extension
    backend.prepare(solution := Solution(backend.libtype, "native"), shape_of(), CPU)
    monkeypatch.delattr(extension, GROUPED[0])
    assert f"lacks {GROUPED[0]}; install a newer one" in str(backend.bind(solution, shape_of(), CPU))
    assert isinstance(bound(backend, Shape("a16w16", 5, 48, 64), "native"), Launcher)
