"""The kernels' logic in Triton's interpreter on a CPU: edges, splits, scales, layouts, routing,
quantisation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
from tunedgemm.plugin import Device, Shape
from tunedgemm.tools.launching import FORMATS
from tunedgemm.tools.tables import ops
from tunedgemm_triton.families import family_of, unsupported

pytest.importorskip("triton")

pytestmark = pytest.mark.interpreter


def _case(kernel: str, m: int, n: int, k: int, *, split_k: int = 1, bias: bool = False, b: int = 0, **fields: Any) -> dict[str, Any]:
    """Return a case, by default of a16w16 and bf16."""
    device = {"multiprocessors": fields.pop("multiprocessors", 4), "gfx": fields.pop("gfx", "sm_90")}
    extra = {"scale_order": order} if (order := fields.pop("order", "")) else {"B": b} if b else {}
    fields = {"op": "a16w16", "dtype": "bf16", **fields, "epilogue": "bias" if bias else "none", "extra": extra}
    return {"kernel": kernel, "split_k": split_k, "shape": Shape(m=m, n=n, k=k, **fields).to_dict(), **device}


_HALF, _FP8, _INT8 = {"dtype": "fp16"}, {"dtype": "fp8_e4m3fn"}, {"dtype": "int8"}
_ROW = {"op": "a8w8", "scale": "row", "outdtype": "fp32"}
_ROW_BF16 = {"scale": "row", "outdtype": "bf16"}
_TENSOR = {"op": "a8w8", "scale": "tensor", "outdtype": "fp16"}
_BLOCK = {"op": "a8w8_blockscale", "scale": "block", "outdtype": "fp32", **_FP8}
_M_MAJOR, _PADDED = {**_BLOCK, "order": "m_major"}, {**_BLOCK, "order": "m_major_padded"}
_16, _32 = {"layout": "aiter16x16"}, {"layout": "aiter32x16"}
_COLUMN = {**_BLOCK, "op": "a8w8_blockscale_bpreshuffle", **_16}
_BATCH, _BATCH8 = {"op": "batched_bf16", "b": 3, "outdtype": "fp32"}, {**_ROW, "op": "batched_a8w8", "b": 2}

DENSE_CASES = [
    _case("gemv_r1_m1n2k128u2_w1s1", 1, 33, 512),
    _case("gemv_r1_m1n4k128u1_w1s1", 1, 30, 200, bias=True),
    _case("gemv_r1_m2n4k64u3_w1s1", 2, 17, 333, dtype="fp16", outdtype="fp32"),
    _case("gemv_r1_m3n2k128u1_w1s1", 3, 9, 128, bias=True, outdtype="fp32"),
    _case("gemv_r1_m4n4k64u2_w1s1", 3, 21, 300, split_k=2, bias=True),
    _case("gemv_r1_m1n8k128u1_w1s1", 1, 20, 500, split_k=4, outdtype="fp32"),
    _case("gemv_r1_m4n2k64u1_w1s1", 7, 6, 190, split_k=3, dtype="fp16"),
    _case("gemv_r1_m2n1k64u1_w1s3", 2, 5, 256, outdtype="fp16"),
    _case("gemv_r1_m1n4k128u1_w1s1", 1, 18, 300, bias=True, **_ROW, **_FP8),
    _case("gemv_r1_m2n4k128u1_w1s1", 2, 18, 256, split_k=2, **_TENSOR, **_INT8),
    _case("gemv_r1_m2n8k128u2_w1s1", 3, 140, 330, split_k=2, **_BLOCK),
    _case("gemv_r1_m2n4k64u1_w1s1", 3, 10, 200, split_k=2, bias=True, **_BATCH),
    _case("gemv_r1_m1n4k64u1_w1s1", 2, 10, 200, bias=True, **_BATCH8, **_INT8),
    _case("gemm_r1_m16n32k32_g1_w4s2", 5, 33, 70, bias=True),
    _case("gemm_r1_m16n32k32_g1_w4s2_t", 17, 40, 96, outdtype="fp32", bias=True),
    _case("gemm_r1_m32n16k32_g2_w4s2", 70, 50, 64, dtype="fp16"),
    _case("gemm_r1_m16n16k32_g1_w4s2", 20, 37, 200, split_k=3, bias=True),
    _case("gemm_r1_m16n32k16_g1_w4s2_t", 9, 37, 100, split_k=4, outdtype="fp32"),
    _case("gemm_r1_m16n16k64_g1_w4s2", 4, 16, 129, split_k=2, dtype="fp16", outdtype="fp32"),
    _case("gemm_r1_m16n32k32_g1_w4s2", 20, 48, 96, bias=True, outdtype="fp32", **_16),
    _case("gemm_r1_m16n32k64_g1_w4s2", 17, 40, 100, bias=True, **_ROW, **_FP8),
    _case("gemm_r1_m16n32k64_g1_w4s2_t", 17, 40, 300, split_k=3, bias=True, **_ROW, **_INT8),
    _case("gemm_r1_m16n32k64_g1_w4s2_t", 17, 40, 100, split_k=2, **_TENSOR, **_FP8),
    _case("gemm_r1_m16n32k64_g1_w4s2", 17, 64, 96, **{**_ROW, "op": "a8w8_bpreshuffle"}, **_INT8, **_32),
    _case("gemm_r1_m16n32k64_g1_w4s2_t", 17, 48, 160, split_k=2, **{**_TENSOR, "op": "a8w8_bpreshuffle"}, **_FP8, **_16),
    _case("gemm_r1_m16n64k128_g1_w4s2", 18, 200, 328, **_BLOCK),
    _case("gemm_r1_m16n64k32_g1_w4s2_t", 18, 150, 300, split_k=2, **_BLOCK),
    _case("gemm_r1_m16n256k128_g1_w4s2", 18, 300, 200, **_BLOCK),
    _case("gemm_r1_m16n256k64_g1_w4s2_t", 5, 300, 200, split_k=2, **_BLOCK),
    _case("gemm_r1_m16n64k128_g1_w4s2", 18, 208, 352, split_k=2, **_COLUMN),
    _case("gemv_r1_m2n8k128u2_w1s1", 3, 140, 330, split_k=2, **_M_MAJOR),
    _case("gemv_r1_m2n8k128u2_w1s1", 3, 140, 330, **_PADDED),
    _case("gemv_r1_m1n8k128u1_w1s1", 1, 20, 500, split_k=2, **_PADDED),
    _case("gemm_r1_m16n64k128_g1_w4s2", 18, 200, 328, **_M_MAJOR),
    _case("gemm_r1_m16n64k32_g1_w4s2_t", 17, 150, 300, split_k=2, **_PADDED),
    _case("gemm_r1_m16n256k128_g1_w4s2", 19, 300, 200, **_PADDED),
    _case("tma_r1_m32n64k128_g8_w4s2", 37, 200, 400, **_M_MAJOR),
    _case("tma_r1_m16n64k64_g8_w4s2_t", 18, 200, 400, split_k=2, **_PADDED),
    _case("gemm_r1_m16n32k32_g1_w4s2", 18, 40, 100, split_k=2, bias=True, **_BATCH),
    _case("gemm_r1_m16n32k32_g1_w4s2_t", 18, 40, 100, split_k=2, bias=True, **_BATCH8, **_INT8),
    # streamk: programs are twice the multiprocessors where operands are described, as with a K of
    # whole 16 bytes.
    _case("streamk_r1_m16n32k32_g2_w4s2", 16, 40, 200, bias=True),  # fewer tiles than programs
    _case("streamk_r1_m16n32k32_g2_w4s2", 70, 50, 99, bias=True, **_HALF),  # ten tiles: two rounds whole, two tiles shared by four
    _case("streamk_r1_m16n16k32_g2_w4s2", 30, 60, 99, outdtype="fp32"),  # as many tiles as two rounds of four
    _case("streamk_r1_m16n16k64_g2_w4s2", 40, 100, 320, outdtype="fp32"),  # 21 tiles: two rounds of eight whole
    _case("streamk_r1_m16n16k32_g2_w4s2", 16, 270, 200, bias=True),  # 17 tiles: a full round and one tile shared by eight
    _case("streamk_r1_m16n32k32_g2_w4s2", 37, 50, 72, bias=True, multiprocessors=1),
    _case("streamk_r1_m16n32k32_g2_w4s2", 37, 50, 99, bias=True, multiprocessors=1),  # one program
    _case("tma_r1_m16n32k32_g2_w4s2", 37, 50, 72, bias=True),
    _case("tma_r1_m16n32k16_g8_w4s2", 40, 50, 200, split_k=3, bias=True),
    _case("tma_r1_m32n32k16_g8_w4s2", 100, 96, 64, dtype="fp16", outdtype="fp32"),
    _case("tma_r1_m32n64k16_g8_w4s2", 60, 96, 64, bias=True),  # few rows outside x: tiles stay in place
    _case("tma_r1_m16n64k32_g8_w4s2_t", 20, 96, 136, split_k=2, bias=True),
    _case("tma_r1_m16n32k64_g8_w4s2", 37, 50, 80, bias=True, **_ROW, **_FP8),
    _case("tma_r1_m16n32k64_g8_w4s2_t", 37, 50, 272, split_k=2, **_TENSOR, **_INT8),
    _case("tma_r1_m32n64k128_g8_w4s2", 37, 200, 400, **_BLOCK),
    _case("tma_r2_m128n64k128_g8_w4s2_ws", 150, 200, 400, **_BLOCK),  # makes the descriptor of x itself
    _case("tma_r1_m16n64k64_g8_w4s2_t", 18, 200, 400, split_k=2, **_BLOCK),
    _case("tma_r1_m16n32k32_g8_w4s2", 37, 50, 200, split_k=2, bias=True, **_BATCH),
    _case("tma_r1_m16n32k32_g8_w4s2", 37, 50, 208, bias=True, **_BATCH8, **_FP8),
]


def _example(op: str, example: int, kernel: str, split_k: int = 1, **changes: Any) -> dict[str, Any]:
    """Return a case of one of the op's examples; `interpreted_cases` describes the changes."""
    return {"op": op, "example": example, "kernel": kernel, "split_k": split_k, **changes}


OP_CASES = [
    _example("fmoe", 0, "moe_r1_m16g1_n32k64w4s2_n32k32w4s2"),
    _example("fmoe", 0, "moe_r1_m16g1_n32k32w4s2_n64k32w4s2_t_a", 3),
    _example("fmoe", 1, "moe_r1_m16g1_n32k64w4s2_n64k32w4s2"),
    _example("fmoe", 2, "moe_r1_m16g2_n16k32w4s2_n32k64w4s2_t", 2),
    _example("fmoe", 3, "moe_r1_m32g1_n16k32w4s2_n64k32w4s2", skewed=True),
    _example("fmoe", 4, "moe_r1_m16g1_n32k64w4s2_n64k32w4s2_t"),
    _example("fmoe", 5, "moe_r1_m16g1_n32k64w4s2_n64k32w4s2"),
    _example("fmoe", 6, "moe_r1_m16g1_n32k64w4s2_n64k64w4s2"),
    _example("fmoe", 6, "moe_r1_m16g1_n64k64w4s2_n64k64w4s2_a", static=True, skewed=True),
    _example("fmoe", 2, "moe_r1_m64g1_n32k64w4s2_n32k32w4s2", m=3001, sort=True),  # more pairs than one program looks at
    _example("fmoe", 0, "moe_r1_m32g1_n32k64w4s2_n32k32w4s2", m=4000, sort=True, skewed=True),
    _example("fmoe", 7, "moe_r1_m16g1_n32k64w4s2_n64k64w4s2_a", 2),
    _example("fmoe", 8, "moe_r1_m16g1_n32k64w4s2_n64k64w4s2_t", 2),
    _example("fmoe", 9, "moe_r1_m16g1_n32k64w4s2_n64k64w4s2", skewed=True),
    _example("fmoe", 11, "moe_r1_m16g1_n64k64w4s2_n64k128w4s2", 2),
    _example("fmoe", 13, "moe_r1_m16g1_n64k64w4s2_n32k64w4s2"),
    _example("fmoe", 14, "moe_r1_m16g1_n64k64w4s2_n32k64w4s2_d"),
    _example("fmoe", 16, "moe_r1_m16g1_n64k64w4s2_n32k64w4s2_t_a_d", skewed=True),
    _example("a4w4_blockscale", 1, "mx_r1_m64n64k128_g2_w4s3_d"),
    _example("a4w4_blockscale", 3, "mx_r1_m16n32k64_g2_w4s3_t_d"),
    _example("a4w4_blockscale", 6, "mx_r1_m16n32k64_g2_w4s3_d"),
    _example("a4w4_blockscale", 7, "mx_r1_m32n64k256_g2_w4s3_d", 3),
    _example("a16w4_blockscale", 1, "mx_r1_m64n64k128_g2_w4s3_d"),
    _example("a16w4_blockscale", 3, "mx_r1_m16n64k128_g2_w4s3_t_d", 2),
]


def _weight_cases() -> list[dict[str, Any]]:
    """Return cases of every weight-only format that has kernels: in all its groups, bf16 and fp16,
    one of them transposed and split.
    """
    cases = []
    for shape in ops()["a16wn"].examples:
        if unsupported(shape, Device("sm_90", 4)):
            continue
        step, other = 32 if shape["w_group"] == 32 else 64, "fp16" if shape.dtype == "bf16" else "bf16"
        for dtype, tile, split_k in ((shape.dtype, f"m16n32k{step}_g1_w4s2_t", 2), (other, f"m16n128k{step}_g2_w4s2", 1)):
            changed = attrs.evolve(shape, dtype=dtype, outdtype="fp32" if shape.m == 1 else dtype)
            cases.append({"kernel": f"wn_r1_{tile}", "split_k": split_k, "shape": changed.to_dict()})
    return cases


def _vector_cases() -> list[dict[str, Any]]:
    """Return the fastest predicted kernel on the vector units of each example with few rows, split
    and not; ends of N and K are ragged.
    """
    cases, device = [], Device("sm_90", 4)
    for shape in {(each["w_format"], each["w_group"]): each for each in ops()["a16wn"].examples}.values():
        ragged = attrs.evolve(shape, n=shape.n + 8, k=shape.k + (int(shape["w_group"]) or 32), outdtype="fp32")
        for m in (1, 3):
            changed = attrs.evolve(ragged, m=m)
            listed = [each for each in family_of("a16wn").enumerate_solutions(changed, device) if each.kernel_name.startswith("wnv")]
            chosen = {each.split_k > 1: each for each in reversed(listed)}.values()
            cases += [{"kernel": each.kernel_name, "split_k": max(each.split_k, 1), "shape": changed.to_dict()} for each in chosen]
    return cases


#: Cases that take seconds each.
SLOW_CASES = [
    _case("streamk_r1_m16n32k16_g2_w4s2", 37, 200, 520, outdtype="fp32", multiprocessors=150),  # 300 of 693 steps: parts of two or three
    _example("fmoe", 6, "moe_r1_m16g1_n64k64w4s2_n64k64w4s2", m=150),
    _example("fmoe", 12, "moe_r1_m16g1_n64k128w4s2_n64k64w4s2_t"),
    _example("fmoe", 10, "moe_r1_m16g1_n32k64w4s2_n64k64w4s2"),
    _example("fmoe", 15, "moe_r1_m16g1_n64k64w4s2_n32k128w4s2_t_d", 2),
    _example("a4w4_blockscale", 2, "mx_r1_m128n32k128_g2_w4s3_d", 2),
    _example("a4w4_blockscale", 5, "mx_r1_m16n32k64_g2_w4s3_t_d", 2),
]


def _faults(cases: list[dict[str, Any]]) -> list[str]:
    """Run cases in a child and return a line for each that is wrong."""
    child = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("interpreted_cases.py"))],
        input=json.dumps(cases), capture_output=True, text=True, timeout=900, env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-3000:]
    results = zip(cases, json.loads(child.stdout), strict=True)
    return [
        f"{case}: {result}"
        for case, result in results
        if not (result["error"] < result["bound"] and result["empty"] and result["guarded"] and result["zeroed"])
    ]


@pytest.mark.nightly
def test_dense_kernels_match_float64_and_keep_to_their_output() -> None:
    """Each kernel is right on ragged shapes, stores every element and no other, and leaves the
    counters zero.
    """
    assert not _faults(DENSE_CASES)


@pytest.mark.nightly
@pytest.mark.parametrize("ops", [("fmoe",), ("a4w4_blockscale", "a16w4_blockscale")], ids=["fmoe", "mx"])
def test_plans_match_the_reference_and_keep_to_their_output(ops: tuple[str, ...]) -> None:
    """Each plan meets the op's tolerance, gives zero to tokens without an expert, and leaves the
    counters zero.
    """
    assert not _faults([case for case in OP_CASES if case["op"] in ops])


@pytest.mark.nightly
def test_decoded_weights_match_float64_and_keep_to_their_output() -> None:
    """Each format, group and dtype is right to the sums' rounding, with odd N and ends of K."""
    assert not _faults(_weight_cases())


@pytest.mark.nightly
def test_vectors_of_decoded_weights_match_float64_and_keep_to_their_output() -> None:
    """Each format and group is right on the vector units, for one row and for three."""
    cases = _vector_cases()
    assert {case["shape"]["extra"]["w_format"] for case in cases} == set(FORMATS)
    assert not _faults(cases)


#: Records that the core lacks: four codes of two bits in a byte; eight of three bits, reordered.
RECORDS = [
    {"name": "int2", "like": "ct_int4", "bits": 2, "dtypes": ["uint8"], "values": [-2, -1, 0, 1], "order": [0, 1, 2, 3]},
    {"name": "int3_zp", "like": "gptq_int4_zp", "bits": 3, "values": list(range(8)), "order": [0, 4, 1, 5, 2, 6, 3, 7]},
]


@pytest.mark.nightly
def test_a_further_format_needs_no_other_kernel() -> None:
    """A new record is decoded as the reference decodes it."""
    cases = []
    for record in RECORDS:
        extra = {"w_format": record["name"], "w_group": 64}
        shape = Shape("a16wn", 3, 72, 256, dtype="fp16", outdtype="fp32", scale="block", extra=extra)
        cases.append({"kernel": "wn_r1_m16n32k64_g1_w4s2_t", "split_k": 2, "shape": shape.to_dict(), "record": record})
    assert not _faults(cases)


@pytest.mark.nightly
def test_slow_cases_match_the_reference_and_keep_to_their_output() -> None:
    """Many programs, many rows, and further kinds of quantisation meet the op's tolerance."""
    assert not _faults(SLOW_CASES)


#: Small shapes of which the lists for wavefronts of 32 lanes are run; fp8 where there is some.
_NARROW = [
    Shape("a16w16", 1, 66, 520, epilogue="bias"), Shape("a16w16", 18, 66, 200), Shape("a8w8", 5, 48, 264, **_INT8, **_ROW_BF16),
    Shape("a8w8", 17, 48, 264, **_FP8, **_ROW_BF16), Shape("a8w8_blockscale", 3, 140, 264, **_FP8, outdtype="bf16", scale="block"),
]  # fmt: skip


def _narrow_cases(gfx: str) -> list[dict[str, Any]]:
    """Return the first listed kernel of each family for small shapes, streamk, and examples of the
    ops that take several steps.
    """
    cases, device = [_case("streamk_r1_m16n32k32_g2_w4s2", 70, 50, 99, bias=True, gfx=gfx)], Device(gfx, 4)
    shapes = [(shape, {"shape": shape.to_dict()}) for shape in _NARROW]
    for op in ("a4w4_blockscale", "fmoe"):
        few = [(shape, {"op": op, "example": index}) for index, shape in enumerate(ops()[op].examples) if shape.m < 20]
        shapes += few[:3] if op == "fmoe" else few
    for shape, named in shapes:
        if unsupported(shape, device):
            continue
        first = {
            kernel.kernel_name.partition("_")[0]: kernel for kernel in reversed([*family_of(shape.op).enumerate_solutions(shape, device)])
        }
        cases += [{"gfx": gfx, "kernel": each.kernel_name, "split_k": max(each.split_k, 1), **named} for each in first.values()]
    return cases


@pytest.mark.nightly
@pytest.mark.parametrize("gfx", ["gfx1100", "gfx1201", "gfx1250"])
def test_kernels_listed_for_wavefronts_of_32_lanes_are_right(gfx: str) -> None:
    """The first of each family computes the reference with the sizes that such a device gets."""
    cases = _narrow_cases(gfx)
    assert {case["kernel"].partition("_")[0] for case in cases} == {"gemv", "gemm", "streamk", "mx", "moe"}
    assert not _faults(cases)
