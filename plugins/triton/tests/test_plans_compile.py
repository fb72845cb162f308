"""Compiling plans without a GPU, in child processes: the right matrix instructions, shared memory within limits, no spills."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tunedgemm.plugin import Device, Shape
from tunedgemm.tools import ops
from tunedgemm_triton.limits import ARCHITECTURES
from tunedgemm_triton.planned import PLANNED

pytest.importorskip("triton")

DEVICES = {
    "gfx942": Device("gfx942", 304),
    "gfx950": Device("gfx950", 256),
    "gfx1201": Device("gfx1201", 64),
    "sm_90": Device("sm_90", 132),
}

#: By architecture and dtype of the operands what multiplies them (AMD's ISA guides; PTX ISA): bf16 where there is nothing for mxfp4.
INSTRUCTIONS = {
    "gfx942": {"bf16": "v_mfma_f32_", "int8": "v_mfma_i32_", "fp8_e4m3fnuz": "_fp8_fp8", "fp4x2": "_bf16"},
    "gfx950": {"bf16": "v_mfma_f32_", "int8": "v_mfma_i32_", "fp8_e4m3fn": "f8", "fp4x2": "v_mfma_scale_f32_"},
    "gfx1201": {"bf16": "v_wmma_f32_", "int8": "v_wmma_i32_", "fp8_e4m3fn": "_fp8_fp8", "fp4x2": "_bf16"},
    "sm_90": {"bf16": ".bf16.bf16", "int8": ".s8.s8", "fp8_e4m3fn": ".e4m3.e4m3", "fp4x2": ".bf16.bf16"},
}
PRODUCTS = ("moe.moe", "mx.mx")

_EXPERTS = {"expert": 32, "topk": 4, "act": "silu", "g1u1": True, "doweight_stage1": False}


def _moe(m: int, dtype: str, kind: str, **extra: Any) -> Shape:
    fields = {**_EXPERTS, "q_dtype_a": dtype, "q_dtype_w": dtype, "q_type": kind, **extra}
    return Shape("fmoe", m, 2048, 768, layout="aiter16x16", extra=fields)


def _shapes(gfx: str) -> Iterator[Shape]:
    """Of each op and dtype that the architecture multiplies, few rows and many."""
    fp8 = ARCHITECTURES[gfx].fp8
    for m in (16, 1024):
        yield _moe(m // 4, "bf16", "No")
        yield _moe(m // 4, "int8", "per_Token", act="gelu")
        yield _moe(m // 4, fp8, "per_1x128")
        yield _moe(m // 4, "fp4x2", "per_1x32", act="swiglu")
        yield Shape("a4w4_blockscale", m, 4096, 4096, dtype="fp4x2", outdtype="bf16", scale="block", layout="aiter16x16")
    yield _moe(1, fp8, "per_Tensor", doweight_stage1=True)
    yield _moe(300, fp8, "per_Token", g1u1=False)
    if ARCHITECTURES[gfx].matrix != "wmma":
        yield Shape("a16w4_blockscale", 16, 4096, 4096, scale="block")


def _check(shapes: list[Shape], device: Device, *, every: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Compile the first solution of each shape, and others that far apart; (case, code) of each product."""
    cases = []
    for shape in shapes:
        listed = list(PLANNED[shape.op].enumerate_solutions(shape, device))
        assert listed, f"nothing is listed for {shape} on {device}"
        for solution in listed[::every]:
            cases.append({"gfx": device.gfx, "shape": shape.to_dict(), "kernel": solution.kernel_name, "split_k": max(solution.split_k, 1)})
    command = [sys.executable, "-W", "error::UserWarning", str(Path(__file__).with_name("compile_plans.py"))]
    child = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, timeout=3600)
    assert child.returncode == 0, child.stderr[-3000:]
    found = []
    for case, codes in zip(cases, json.loads(child.stdout), strict=True):
        for code in codes:
            assert "failed" not in code, f"{case}: {code}"
            assert code["shared"] <= ARCHITECTURES[device.gfx].shared_bytes, f"{case}: {code}"
            if code["function"] in PRODUCTS:
                found.append((case, code))
    return found


def _operands(case: dict[str, Any]) -> str:
    shape = Shape.from_dict(case["shape"])
    kinds = {"fmoe": lambda: str(shape["q_dtype_w"]), "a4w4_blockscale": lambda: "fp4x2", "a16w4_blockscale": lambda: "bf16"}
    return kinds[shape.op]()


@pytest.mark.parametrize("gfx", DEVICES)
def test_first_guesses_multiply_with_the_right_instruction_and_do_not_spill(gfx: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Of each op, dtype and class of rows the first guess uses the right matrix instruction, fits the memory and does not spill."""
    monkeypatch.setenv("TUNEDGEMM_CACHE", str(tmp_path))
    for case, code in _check(list(_shapes(gfx)), DEVICES[gfx], every=99):
        assert any(INSTRUCTIONS[gfx][_operands(case)] in text for text in code["matrix"]), f"{case}: {code}"
        assert code["spills"] == 0, f"{case}: {code}"


@pytest.mark.sweep
@pytest.mark.parametrize("gfx", DEVICES)
def test_a_sample_of_the_space_compiles_within_the_limits(gfx: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Every 16th solution compiles, fits the shared memory and multiplies with the matrix instruction."""
    monkeypatch.setenv("TUNEDGEMM_CACHE", str(tmp_path))
    for case, code in _check(list(_shapes(gfx)), DEVICES[gfx], every=16):
        assert code["matrix"], f"{case}: {code}"


def test_the_examples_of_the_ops_have_solutions() -> None:
    """Whatever the architecture supports of an op's examples has at least one kernel."""
    for op in PLANNED:
        for device in DEVICES.values():
            for shape in (*ops()[op].examples, *ops()[op].large):
                if PLANNED[op].supports(shape, device):
                    assert list(PLANNED[op].enumerate_solutions(shape, device)), f"{shape} on {device.gfx}"
