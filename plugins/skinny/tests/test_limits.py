"""Static limits: supported shapes, and the reasons for the others."""

from __future__ import annotations

import attrs
import pytest
from tunedgemm.plugin import Device, Shape
from tunedgemm.tools.launching import ARCHITECTURES
from tunedgemm_skinny import skinny
from tunedgemm_skinny.limits import TILED, UNTILED, unsupported
from tunedgemm_skinny.names import Packed
from tunedgemm_skinny.resources import unfit

PLAIN = Shape("a16w16", 4, 48, 64)
FP8 = Shape("a8w8", 4, 48, 64, dtype="fp8_e4m3fn", outdtype="bf16", scale="row")
FP4 = Shape("a16w4_blockscale", 4, 48, 64, dtype="fp16", outdtype="bf16", scale="block")
CODES = Shape("a16wn", 4, 48, 256, scale="block", extra={"w_format": "gptq_int4", "w_group": 128})
BATCH = Shape("batched_bf16", 4, 48, 64, extra={"B": 3})
H200, MI300 = Device("sm_90", 132, "nvidia-h200"), Device("gfx942", 304, "amd-instinct-mi300x")

#: Unsupported shapes, and a part of the reason.
REFUSED = [
    (Device("cpu-avx512", 16), PLAIN, "device must be an NVIDIA or AMD GPU (got cpu-avx512)"),
    (Device("gfx906", 60), PLAIN, "architecture must be one of sm_80, "),
    (Device("sm_75", 40), PLAIN, "(got sm_75)"),
    (H200, attrs.evolve(PLAIN, m=0), "M must be in 1..64 (got 0)"),
    (H200, attrs.evolve(PLAIN, m=65), "M must be in 1..64 (got 65)"),
    (H200, attrs.evolve(PLAIN, n=1 << 20, k=(1 << 20) + 1), "an operand must have at most 1099511627776 elements (got 1048576 x 1048577)"),
    (H200, attrs.evolve(PLAIN, dtype="fp32", outdtype="fp32"), "a16w16: operands must be bf16 or fp16 (got fp32)"),
    (MI300, attrs.evolve(PLAIN, dtype="fp8_e4m3fnuz"), "(got fp8_e4m3fnuz)"),
    (H200, attrs.evolve(PLAIN, outdtype="fp8_e4m3fn"), "output must be bf16, fp16, fp32 (got fp8_e4m3fn)"),
    (H200, attrs.evolve(PLAIN, epilogue="bias", bias_dtype="fp64"), "bias must be bf16, fp16, fp32 (got fp64)"),
    (H200, attrs.evolve(PLAIN, scale="tensor"), "a16w16: scales must be none (got tensor)"),
    (MI300, attrs.evolve(PLAIN, layout="ck-n64"), "weight layout must be row or an AITER order (got 'ck-n64')"),
    (H200, FP4, "a16w4_blockscale: x must be bf16 (got fp16)"),
    (H200, attrs.evolve(FP8, dtype="fp8_e4m3fnuz"), "fp8 on sm_90 must be fp8_e4m3fn (got fp8_e4m3fnuz)"),
    (MI300, FP8, "fp8 on gfx942 must be fp8_e4m3fnuz (got fp8_e4m3fn)"),
    (Device("sm_80", 108), FP8, "sm_80 has no fp8"),
    (Device("gfx90a", 104), FP8, "gfx90a has no fp8"),
    (H200, attrs.evolve(FP8, op="a8w8_blockscale"), "a8w8_blockscale: scales must be block (got row)"),
    (H200, attrs.evolve(FP8, op="a8w8_blockscale", dtype="int8", scale="block"), "must be fp8_e4m3fn or fp8_e4m3fnuz (got int8)"),
    (H200, attrs.evolve(BATCH, dtype="int8"), "batched_bf16: operands must be bf16 or fp16 (got int8)"),
    (H200, attrs.evolve(BATCH, extra={"B": 65536}), "B must be at most 65535 (got 65536)"),
    (MI300, CODES, "a16wn needs NVIDIA's mma (got gfx942)"),
    (H200, attrs.evolve(CODES, extra={"w_format": "mxfp8", "w_group": 32}), "a16wn: format must be one of ct_int4, "),
    (H200, attrs.evolve(CODES, dtype="fp16", outdtype="fp16", extra={"w_format": "nvfp4", "w_group": 16}), "nvfp4: x must be bf16"),
    (Device("sm_80", 108), attrs.evolve(CODES, extra={"w_format": "nvfp4", "w_group": 16}), "nvfp4: sm_80 has no fp8"),
    (H200, attrs.evolve(CODES, m=17), "a16wn: M must be at most 16 (got 17)"),
    (H200, attrs.evolve(CODES, n=1 << 20, k=1 << 15), "N x K must be at most 17179869184 (got 1048576 x 32768)"),
    (H200, attrs.evolve(CODES, k=192), "gptq_int4: K must be a multiple of 128, or a group of 32 or 64 (got 192)"),
    (H200, attrs.evolve(CODES, n=12), "gptq_int4: N must be a multiple of 8 (got 12)"),
    (H200, attrs.evolve(CODES, layout="marlin"), "the weight must be as the checkpoint has it (got layout 'marlin')"),
    (H200, attrs.evolve(BATCH, m=65), "M must be in 1..64 (got 65)"),
]


@pytest.mark.cases("gfx", TILED)
@pytest.mark.cases("m", [1, 8, 9, 64])
def test_dtypes_are_supported(gfx: str, m: int) -> None:
    """Architectures with tiles support every dtype, with and without bias, up to 64 rows."""
    for dtype in ("bf16", "fp16"):
        for outdtype in ("bf16", "fp16", "fp32"):
            for fields in ({}, {"epilogue": "bias"}, {"epilogue": "bias", "bias_dtype": "fp32"}):
                assert not unsupported(Shape("a16w16", m, 1, 1, dtype=dtype, outdtype=outdtype, **fields), Device(gfx, 100))


@pytest.mark.cases("gfx", TILED)
@pytest.mark.cases("m", [1, 64])
def test_other_ops_are_supported(gfx: str, m: int) -> None:
    """Architectures with tiles support int8, batches and their fp8, with every scale of the op."""
    fp8, device = ARCHITECTURES[gfx].fp8, Device(gfx, 100)
    for dtype in ("int8", fp8) if fp8 else ("int8",):
        for scale in ("tensor", "row"):
            assert not unsupported(Shape("a8w8", m, 1, 1, dtype=dtype, outdtype="bf16", scale=scale, epilogue="bias"), device)
        assert not unsupported(Shape("batched_a8w8", m, 1, 1, dtype=dtype, outdtype="fp32", scale="row", extra={"B": 65535}), device)
    assert not unsupported(Shape("batched_bf16", m, 1, 1, dtype="fp16", epilogue="bias", extra={"B": 1}), device)
    assert not (fp8 and unsupported(Shape("a8w8_blockscale", m, 1, 1, dtype=fp8, outdtype="fp16", scale="block"), device))


@pytest.mark.cases("gfx", TILED)
@pytest.mark.cases("layout", ["row", "aiter16x16"])
def test_mxfp4_and_shuffled_weights_are_supported(gfx: str, layout: str) -> None:
    """Every architecture with tiles supports mxfp4 weights and AITER's weight orders."""
    fields, device = {"outdtype": "bf16", "scale": "block", "layout": layout}, Device(gfx, 100)
    for op, dtype in (("a4w4_blockscale", "fp4x2"), ("a16w4_blockscale", "bf16")):
        assert not unsupported(Shape(op, 4, 48, 64, dtype=dtype, **fields), device)
    assert not unsupported(Shape("a16w16", 4, 48, 64, layout=layout), device)
    assert not unsupported(Shape("a8w8_bpreshuffle", 4, 48, 64, dtype="int8", outdtype="bf16", scale="row", layout="aiter32x16"), device)


@pytest.mark.cases("gfx", UNTILED)
def test_architectures_without_tiles_support_few_rows_of_plain_weights(gfx: str) -> None:
    """RDNA has the family rows alone: up to 8 rows, without blocks, mxfp4 and shuffled weights."""
    device = Device(gfx, 64)
    assert not unsupported(attrs.evolve(PLAIN, m=8), device)
    assert {kernel.kernel_name.partition("_")[0] for kernel in skinny.solutions(PLAIN, device)} == {"rows"}
    blocks = attrs.evolve(FP8, op="a8w8_blockscale", scale="block", dtype=ARCHITECTURES[gfx].fp8 or "fp8_e4m3fn")
    for shape in (attrs.evolve(PLAIN, m=9), attrs.evolve(PLAIN, layout="aiter16x16"), attrs.evolve(FP4, dtype="bf16"), blocks):
        assert unsupported(shape, device)


@pytest.mark.parametrize(("gfx", "most"), [("sm_122", 64), ("sm_88", 64), ("gfx1103", 8)])
def test_an_unknown_member_of_a_family_has_its_limits(gfx: str, most: int) -> None:
    """It gets kernels within the least that the known members have."""
    assert not unsupported(attrs.evolve(PLAIN, m=most), Device(gfx, 40))
    assert list(skinny.solutions(PLAIN, Device(gfx, 40)))


@pytest.mark.cases(("device", "shape", "reason"), REFUSED)
def test_unsupported_shapes_have_a_reason(device: Device, shape: Shape, reason: str) -> None:
    """An unsupported shape has a reason with the wrong value."""
    answer = unsupported(shape, device)
    assert answer and reason in answer


@pytest.mark.cases("name", ["gptq_int4_order", "gptq_int8", "mxfp8"])
@pytest.mark.cases(("k", "group"), [(256, 128), (48, 48), (16, 16), (192, 128)])
def test_a_kernel_of_a_table_is_refused_as_the_shape_is(name: str, k: int, group: int) -> None:
    """A name in a row serves no format and no K that the list has no kernel for."""
    odd = attrs.evolve(CODES, k=k, extra={"w_format": name, "w_group": group})
    plain = attrs.evolve(odd, extra={"w_format": "ct_int4", "w_group": group})
    for shape in (odd, plain):
        fault = unsupported(shape, H200)
        assert bool(fault) == (shape is odd or k != 256)
        assert not fault or unfit(Packed(1, 1, 1, 1), 1, shape, "sm_90") == f"packed_r1_n1w1x1u1: {fault}"
