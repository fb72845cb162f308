"""The logic of planned ops, in Triton's interpreter on a CPU: routing, quantisation, scales, layouts, splits, tails."""

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


def _case(op: str, example: int, kernel: str, split_k: int = 1, **changes: Any) -> dict[str, Any]:
    return {"op": op, "example": example, "kernel": kernel, "split_k": split_k, **changes}


#: The places are those of the ops' examples; `interpreted_plans` says what the changes are.
CASES = [
    _case("fmoe", 0, "moe_r1_m16g1_n32k64w4s2_n32k32w4s2"),
    _case("fmoe", 0, "moe_r1_m16g1_n32k32w4s2_n64k32w4s2_t_a", 3),
    _case("fmoe", 1, "moe_r1_m16g1_n32k64w4s2_n64k32w4s2"),
    _case("fmoe", 2, "moe_r1_m16g2_n16k32w4s2_n32k64w4s2_t", 2),
    _case("fmoe", 3, "moe_r1_m32g1_n16k32w4s2_n64k32w4s2", skewed=True),
    _case("fmoe", 4, "moe_r1_m16g1_n32k64w4s2_n64k32w4s2_t"),
    _case("fmoe", 5, "moe_r1_m16g1_n32k64w4s2_n64k32w4s2"),
    _case("fmoe", 6, "moe_r1_m16g1_n32k64w4s2_n64k64w4s2"),
    _case("fmoe", 6, "moe_r1_m16g1_n64k64w4s2_n64k64w4s2_a", static=True, skewed=True),
    _case("fmoe", 6, "moe_r1_m16g1_n64k64w4s2_n64k64w4s2", m=150),
    _case("fmoe", 2, "moe_r1_m64g1_n32k64w4s2_n32k32w4s2", m=3001, sort=True),  # more pairs than one program looks at
    _case("fmoe", 0, "moe_r1_m32g1_n32k64w4s2_n32k32w4s2", m=4000, sort=True, skewed=True),
    _case("fmoe", 7, "moe_r1_m16g1_n32k64w4s2_n64k64w4s2_a", 2),
    _case("fmoe", 8, "moe_r1_m16g1_n32k64w4s2_n64k64w4s2_t", 2),
    _case("fmoe", 9, "moe_r1_m16g1_n32k64w4s2_n64k64w4s2", skewed=True),
    _case("fmoe", 10, "moe_r1_m16g1_n32k64w4s2_n64k64w4s2"),
    _case("fmoe", 11, "moe_r1_m16g1_n64k64w4s2_n64k128w4s2", 2),
    _case("fmoe", 12, "moe_r1_m16g1_n64k128w4s2_n64k64w4s2_t"),
    _case("fmoe", 13, "moe_r1_m16g1_n64k64w4s2_n32k64w4s2"),
    _case("fmoe", 14, "moe_r1_m16g1_n64k64w4s2_n32k64w4s2_d"),
    _case("fmoe", 15, "moe_r1_m16g1_n64k64w4s2_n32k128w4s2_t_d", 2),
    _case("fmoe", 16, "moe_r1_m16g1_n64k64w4s2_n32k64w4s2_t_a_d", skewed=True),
    _case("a4w4_blockscale", 1, "mx_r1_m64n64k128_g2_w4s3_d"),
    _case("a4w4_blockscale", 2, "mx_r1_m128n32k128_g2_w4s3_d", 2),
    _case("a4w4_blockscale", 3, "mx_r1_m16n32k64_g2_w4s3_t_d"),
    _case("a4w4_blockscale", 5, "mx_r1_m16n32k64_g2_w4s3_t_d", 2),
    _case("a4w4_blockscale", 6, "mx_r1_m16n32k64_g2_w4s3_d"),
    _case("a4w4_blockscale", 7, "mx_r1_m32n64k256_g2_w4s3_d", 3),
    _case("a16w4_blockscale", 1, "mx_r1_m64n64k128_g2_w4s3_d"),
    _case("a16w4_blockscale", 3, "mx_r1_m16n64k128_g2_w4s3_t_d", 2),
]

#: numpy 2.4 and later break every loop in the interpreter of Triton 3.6.
BROKEN = version("triton").startswith("3.6") and tuple(map(int, version("numpy").split(".")[:2])) >= (2, 4)
pytestmark = pytest.mark.skipif(BROKEN, reason="Triton 3.6's interpreter does not run with numpy 2.4 or later")


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """What the child measured, one entry a case."""
    child = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("interpreted_plans.py"))],
        input=json.dumps(CASES), capture_output=True, text=True, timeout=600, env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(child.stdout)
    return found


@pytest.mark.parametrize("place", range(len(CASES)), ids=lambda place: f"{CASES[place]['kernel']}-{place}")
def test_a_plan_matches_the_reference_and_stores_every_element_and_no_other(results: list[dict[str, Any]], place: int) -> None:
    """Each plan is as near to the op's reference as the op demands, gives nothing to tokens of no expert, and keeps to its output."""
    result = results[place]
    assert result["error"] < result["bound"] / 2
    assert result["empty"]
    assert result["guarded"]
    assert result["zeroed"]
