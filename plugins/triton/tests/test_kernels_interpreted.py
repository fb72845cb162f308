"""The kernels' logic, in Triton's interpreter on a CPU: edges, splits, bias, dtypes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")


def _case(
    kernel: str, m: int, n: int, k: int, *, split_k: int = 1, dtype: str = "bf16", out: str = "", bias: bool = False
) -> dict[str, Any]:
    return {"kernel": kernel, "split_k": split_k, "m": m, "n": n, "k": k, "dtype": dtype, "outdtype": out or dtype, "bias": bias}


CASES = [
    _case("gemv_r1_m1n2k128u2_w1s1", 1, 33, 512),
    _case("gemv_r1_m1n4k128u1_w1s1", 1, 30, 200, bias=True),
    _case("gemv_r1_m2n4k64u3_w1s1", 2, 17, 333, dtype="fp16", out="fp32"),
    _case("gemv_r1_m3n2k128u1_w1s1", 3, 9, 128, bias=True, out="fp32"),
    _case("gemv_r1_m4n4k64u2_w1s1", 3, 21, 300, split_k=2, bias=True),
    _case("gemv_r1_m1n8k128u1_w1s1", 1, 20, 500, split_k=4, out="fp32"),
    _case("gemv_r1_m4n2k64u1_w1s1", 7, 6, 190, split_k=3, dtype="fp16"),
    _case("gemv_r1_m2n1k64u1_w1s3", 2, 5, 256, out="fp16"),
    _case("gemm_r1_m16n32k32_g1_w4s2", 5, 33, 70, bias=True),
    _case("gemm_r1_m16n32k32_g1_w4s2_t", 17, 40, 96, out="fp32", bias=True),
    _case("gemm_r1_m32n16k32_g2_w4s2", 70, 50, 64, dtype="fp16"),
    _case("gemm_r1_m16n16k32_g1_w4s2", 20, 37, 200, split_k=3, bias=True),
    _case("gemm_r1_m16n32k16_g1_w4s2_t", 9, 37, 100, split_k=4, out="fp32"),
    _case("gemm_r1_m16n16k64_g1_w4s2", 4, 16, 129, split_k=2, dtype="fp16", out="fp32"),
    _case("tma_r1_m16n32k32_g2_w4s2", 37, 50, 72, bias=True),
    _case("tma_r1_m16n32k16_g8_w4s2", 40, 50, 200, split_k=3, bias=True),
    _case("tma_r1_m32n32k16_g8_w4s2", 100, 96, 64, dtype="fp16", out="fp32"),
]

#: The interpreter's cast of float32 to bfloat16 truncates: an element is off by up to 2^-7.
BOUNDS = {"bf16": 2.0**-7, "fp16": 2.0**-9, "fp32": 2.0**-12}


#: numpy 2.4 and later break every loop in the interpreter of Triton 3.6.
BROKEN = version("triton").startswith("3.6") and tuple(map(int, version("numpy").split(".")[:2])) >= (2, 4)
pytestmark = pytest.mark.skipif(BROKEN, reason="Triton 3.6's interpreter does not run with numpy 2.4 or later")


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """What the child measured, one entry a case."""
    child = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("interpreted_cases.py"))],
        input=json.dumps(CASES), capture_output=True, text=True, timeout=300, env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-3000:]
    return json.loads(child.stdout)


@pytest.mark.parametrize("place", range(len(CASES)), ids=lambda place: f"{CASES[place]['kernel']}-{place}")
def test_a_kernel_matches_float64_and_stores_every_element_and_no_other(results: list[dict[str, Any]], place: int) -> None:
    """Each kernel is right on ragged shapes, never rounds a float32 output through a narrow type, and keeps to its output."""
    result = results[place]
    assert result["error"] < BOUNDS[CASES[place]["outdtype"]]
    assert result["guarded"]
    assert result["zeroed"]
