"""Operand layouts of shapes, and the static limits, with and without the library."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from tunedgemm.plugin import Device, Launcher, Shape, Solution
from tunedgemm_hipblaslt.abi import CUBLASLT, HIPBLASLT
from tunedgemm_hipblaslt.limits import SHUFFLED_LAYOUT, Problem, is_quantised, make_problem, supported_ops, unsupported

H200, A100, L40, B200 = Device("sm_90", 132, "nvidia-h200"), Device("sm_80", 108), Device("sm_89", 142), Device("sm_100", 148)
MI300, MI350, MI250 = Device("gfx942", 304), Device("gfx950", 256), Device("gfx90a", 104)
CPU = Device("cpu-avx512", 16)
FN = Shape("a8w8", 5, 48, 64, dtype="fp8_e4m3fn", outdtype="bf16", scale="row")
FNUZ = attrs.evolve(FN, dtype="fp8_e4m3fnuz")
INT8 = attrs.evolve(FN, dtype="int8")
PLAIN = Shape("a16w16", 5, 48, 64)
BIASED = attrs.evolve(PLAIN, epilogue="bias", bias_dtype="bf16")
SHUFFLED = attrs.evolve(PLAIN, layout=SHUFFLED_LAYOUT)
BLOCKS = attrs.evolve(FN, op="a8w8_blockscale", scale="block")
BATCH = {"extra": {"B": 3}}
BATCHED = attrs.evolve(PLAIN, op="batched_bf16", **BATCH)

ACCEPTED = [
    *(
        (CUBLASLT, device, shape)
        for device in (H200, A100)
        for shape in (PLAIN, INT8, attrs.evolve(PLAIN, k=8190), attrs.evolve(PLAIN, n=1))
    ),
    *((CUBLASLT, device, attrs.evolve(FN, scale="tensor")) for device in (H200, L40, B200)),
    *((CUBLASLT, H200, shape) for shape in (FN, BLOCKS)),
    (CUBLASLT, L40, attrs.evolve(FN, op="batched_a8w8", **BATCH)),
    *((HIPBLASLT, device, PLAIN) for device in (MI250, MI300, MI350)),
    *((HIPBLASLT, device, SHUFFLED) for device in (MI300, MI350)),
    *(
        (HIPBLASLT, MI300, shape)
        for shape in (FNUZ, INT8, attrs.evolve(FNUZ, n=50), attrs.evolve(FNUZ, op="a8w8_bpreshuffle", layout=SHUFFLED_LAYOUT))
    ),
    (HIPBLASLT, MI350, FN),
]
#: Refused shapes, with a part of the reason.
REFUSED = [
    (CUBLASLT, MI300, PLAIN, "cublaslt: needs an NVIDIA device (got gfx942)"),
    (HIPBLASLT, H200, PLAIN, "hipblaslt: needs an AMD device (got sm_90)"),
    (CUBLASLT, CPU, PLAIN, "(got cpu-avx512)"),
    (CUBLASLT, H200, attrs.evolve(PLAIN, m=0), "empty batch"),
    (HIPBLASLT, MI300, attrs.evolve(SHUFFLED, m=0), "empty batch"),
    (CUBLASLT, H200, SHUFFLED, "plain [N, K] weights"),
    (HIPBLASLT, MI250, SHUFFLED, "on gfx942 and gfx950"),
    (HIPBLASLT, MI300, attrs.evolve(SHUFFLED, layout="aiter32x16"), f"reads {SHUFFLED_LAYOUT}"),
    (HIPBLASLT, MI300, attrs.evolve(SHUFFLED, dtype="fp32", outdtype="fp32"), "16-bit floats and fp8 (got fp32)"),
    (HIPBLASLT, MI300, attrs.evolve(INT8, layout=SHUFFLED_LAYOUT), "16-bit floats and fp8 (got int8)"),
    (CUBLASLT, H200, attrs.evolve(PLAIN, dtype="fp64", outdtype="fp64"), "operands must be bf16, fp16, fp32"),
    (CUBLASLT, H200, attrs.evolve(FN, k=72), "K: 8-bit operands need a multiple of 16 (got 72)"),
    (CUBLASLT, H200, attrs.evolve(BLOCKS, k=8190), "K: 8-bit operands need a multiple of 16 (got 8190)"),
    (HIPBLASLT, MI300, attrs.evolve(FNUZ, k=8190), "K: 8-bit operands need a multiple of 16 (got 8190)"),
    (CUBLASLT, H200, attrs.evolve(INT8, k=40), "K: 8-bit operands need a multiple of 16 (got 40)"),
    (CUBLASLT, H200, attrs.evolve(FN, n=50), "N: fp8 products need a multiple of 16 (got 50)"),
    (CUBLASLT, H200, attrs.evolve(INT8, n=50), "N: int8 products need a multiple of 4 (got 50)"),
    (CUBLASLT, A100, FN, "sm_80 multiplies no fp8"),
    (CUBLASLT, H200, FNUZ, "sm_90 multiplies fp8_e4m3fn (got fp8_e4m3fnuz)"),
    (HIPBLASLT, MI300, FN, "gfx942 multiplies fp8_e4m3fnuz (got fp8_e4m3fn)"),
    (HIPBLASLT, MI350, FNUZ, "gfx950 multiplies fp8_e4m3fn (got fp8_e4m3fnuz)"),
    (HIPBLASLT, MI250, FNUZ, "gfx90a multiplies no fp8"),
    (CUBLASLT, L40, FN, "row scales need sm_90 (got sm_89)"),
    (CUBLASLT, B200, BLOCKS, "block scales need sm_90 (got sm_100)"),
    (CUBLASLT, H200, attrs.evolve(PLAIN, scale="tensor"), "scaled operands must have 8 bits (got bf16)"),
    (CUBLASLT, H200, attrs.evolve(PLAIN, outdtype="fp16"), "bf16 operands give bf16 or fp32 (got fp16)"),
    (CUBLASLT, H200, attrs.evolve(FN, outdtype="fp8_e4m3fn"), "outdtype: must be bf16, fp16, fp32"),
    (CUBLASLT, H200, attrs.evolve(PLAIN, epilogue="bias", bias_dtype="fp64"), "bias: must be bf16, fp16, fp32"),
]  # fmt: skip


def test_accepted_shapes() -> None:
    """Each architecture accepts the shapes that its library multiplies."""
    faults = [f"{shape} on {device.gfx}: {reason}" for abi, device, shape in ACCEPTED if (reason := unsupported(shape, device, abi))]
    assert not faults


def test_refused_shapes() -> None:
    """A refusal names the rejected value and what would be accepted."""
    answers = [(unsupported(shape, device, abi), reason) for abi, device, shape, reason in REFUSED]
    faults = [(answer, reason) for answer, reason in answers if answer is None or reason not in answer]
    assert not faults


def test_ops() -> None:
    """The libraries differ in block scales and shuffled weights alone."""
    assert set(supported_ops(CUBLASLT)) ^ set(supported_ops(HIPBLASLT)) == {"a8w8_blockscale", "a8w8_bpreshuffle"}
    assert "a16w16" in supported_ops(CUBLASLT)


def _small_shapes() -> list[Shape]:
    sizes = [(m, n, k) for m in (1, 3) for n in (1, 4, 16, 40, 50) for k in (1, 16, 24, 40)]
    kinds: list[dict[str, Any]] = [
        {"op": "a16w16", "dtype": dtype, "outdtype": out} for dtype in ("bf16", "fp32") for out in ("bf16", "fp32")
    ]
    kinds += [{"op": "a8w8", "dtype": "int8", "outdtype": "bf16", "scale": "row"}]
    kinds += [
        {"op": "a8w8", "dtype": dtype, "outdtype": "fp32", "scale": scale}
        for dtype in ("fp8_e4m3fn", "fp8_e4m3fnuz")
        for scale in ("row", "tensor")
    ]
    kinds += [{"op": "a8w8_blockscale", "dtype": "fp8_e4m3fn", "outdtype": "bf16", "scale": "block"}]
    return [Shape(m=m, n=n, k=k, **kind) for kind in kinds for m, n, k in sizes]


@pytest.mark.parametrize("lt", ["cublaslt", "hipblaslt"], indirect=True)
def test_the_library_agrees(lt: Any, harness: Any) -> None:
    """Each accepted small shape binds to the library's first answer."""
    accepted = [shape for shape in _small_shapes() if not lt.refusal(shape, harness.CPU)]
    first = Solution(lt.hooks.abi.libtype, harness.FIRST)
    faults = [shape for shape in accepted if not isinstance(lt.bind(first, shape, harness.CPU), Launcher)]
    assert len(accepted) > 80
    assert not faults


def test_bias_placement() -> None:
    """The bias is added in the epilogue where the library can, else after the product."""
    cases = [
        (PLAIN, False, "", ""),
        (BIASED, False, "bf16", ""),
        (BIASED, True, "", "bias"),
        (attrs.evolve(BIASED, bias_dtype="fp32"), False, "fp32", ""),
        (attrs.evolve(FN, epilogue="bias", bias_dtype="bf16"), False, "bf16", ""),
        (attrs.evolve(INT8, epilogue="bias", bias_dtype="bf16"), False, "", "scales"),
        (INT8, True, "", "scales"),
        (attrs.evolve(BATCHED, epilogue="bias", bias_dtype="bf16"), False, "", "bias"),
        (attrs.evolve(INT8, op="batched_a8w8", epilogue="bias", bias_dtype="bf16", **BATCH), False, "", "scales"),
    ]
    problems = [(make_problem(shape, bias_after=after), *expected) for shape, after, *expected in cases]
    faults = [problem for problem, dtype, remainder in problems if (problem.bias_dtype, problem.remainder) != (dtype, remainder)]
    assert not faults


def test_scale_placement() -> None:
    """Scales are applied in the product where the library can, else after an exact product."""
    cases = [
        (FN, ("row", "row"), "bf16"),
        (attrs.evolve(FN, scale="tensor"), ("tensor", "tensor"), "bf16"),
        (INT8, ("", ""), "int32"),
        (attrs.evolve(INT8, scale="tensor"), ("", ""), "int32"),
        (BLOCKS, ("square", "block"), "bf16"),
        (attrs.evolve(FN, op="batched_a8w8", extra={"B": 3}), ("", ""), "fp32"),
        (attrs.evolve(FN, op="batched_a8w8", extra={"B": 1}), ("row", "row"), "bf16"),
        (attrs.evolve(INT8, op="batched_a8w8", extra={"B": 1}), ("", ""), "int32"),
        (attrs.evolve(FN, op="a16w16", scale="none"), ("", ""), "bf16"),
    ]
    faults = []
    for shape, scales, dtype in cases:
        problem = make_problem(shape)
        compute = "32i" if dtype == "int32" else "32f"
        remainder = "scales" if not scales[0] and shape.scale != "none" else ""
        got = (problem.a_scale, problem.b_scale), problem.d.dtype, problem.compute, problem.remainder
        faults += [(shape, got)] if got != (scales, dtype, compute, remainder) else []
    assert not faults


def test_values_of_a_problem() -> None:
    """The short accumulator is opt-in, remainders are checked, and 8-bit dtypes are quantised."""
    assert [make_problem(FN, fast_accum=fast).fast_accum for fast in (False, True)] == [False, True]
    assert not make_problem(FN).fast_accum
    matrix = make_problem(PLAIN).a
    with pytest.raises(ValueError, match="remainder"):
        Problem(matrix, matrix, matrix, remainder="gelu")
    dtypes = ("bf16", "fp16", "fp32", "int8", "fp8_e4m3fn", "fp8_e4m3fnuz")
    assert [is_quantised(dtype) for dtype in dtypes] == [False, False, False, True, True, True]


@pytest.mark.parametrize("gfx", ["sm_89", "sm_107", "sm_110", "sm_121", "sm_122", "gfx1200", "gfx1250"])
def test_fp8_is_served_where_the_architecture_multiplies_it(gfx: str) -> None:
    """The table of architectures decides, for an unknown member of a family, too."""
    device = Device(gfx, 64)
    abi = CUBLASLT if device.kind == "nvidia" else HIPBLASLT
    assert unsupported(attrs.evolve(FN, scale="tensor"), device, abi) is None
    assert "no fp8" in str(unsupported(FN, Device("sm_87" if device.kind == "nvidia" else "gfx1151", 64), abi))
