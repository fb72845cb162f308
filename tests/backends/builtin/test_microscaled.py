"""Routes of a8w8_mxfp8 and a4w4_nvfp4: which one a device takes, and what each multiplies."""

import attrs
import pytest
import torch
from torch.nn.functional import ScalingType, SwizzleType
from tunedgemm.backends.builtin.microscaled import family
from tunedgemm.device import Device
from tunedgemm.dtype import torch_dtype
from tunedgemm.ops import op_named
from tunedgemm.ops.accuracy import worst_row_error
from tunedgemm.ops.formats.scales import unswizzle_scale
from tunedgemm.ops.formats.weight_only import Weight, decode
from tunedgemm.ops.weight_formats import FORMATS
from tunedgemm.shape import Shape
from tunedgemm.testing.listed import listed

NAMES = ("a8w8_mxfp8", "a4w4_nvfp4")
H200, MI355X = Device("sm_90", 132, "nvidia-h200"), Device("gfx950", 256, "amd-instinct-mi355x")
B200, RTX = Device("sm_100", 148, "nvidia-b200"), Device("sm_120", 188, "nvidia-rtx-pro-6000")
OLD = attrs.evolve(B200, versions=(("cuda", "12.6"),))
CPU = Device("cpu-avx512", 1, "cpu", index=-1)


def shape(op, m=4, n=64, k=128, **fields):
    dtype = "fp8_e4m3fn" if op == "a8w8_mxfp8" else "fp4x2"
    return Shape(op, m, n, k, dtype, **{"outdtype": "bf16", "scale": "block", **fields})


def test_routes_by_device():
    """cuBLASLt's product is taken where it exists; a CPU multiplies in float32 unless bf16 is the result."""
    for op in NAMES:
        assert [family.native(shape(op), device) for device in (B200, RTX, H200, MI355X, OLD)] == ["scaled_mm"] * 2 + ["bf16"] * 3
        assert family.native(shape(op, n=72), B200) == "bf16"
        assert family.native(shape(op, outdtype="fp32"), CPU) == "float32"
    assert [family.native(shape(op), CPU) for op in NAMES] == ["bf16", "float32"]
    assert family.native(shape("a8w8_mxfp8", epilogue="bias", bias_dtype="fp32"), CPU) == "bf16"


@listed(("op", "device", "fields", "reason"), [
    ("a8w8_mxfp8", H200, {}, "multiplies mxfp8 on sm_100 and newer (got sm_90)"),
    ("a4w4_nvfp4", MI355X, {}, "multiplies nvfp4 on sm_100 and newer (got gfx950)"),
    ("a4w4_nvfp4", OLD, {}, "needs CUDA 12.8 or newer (got 12.6)"),
    ("a4w4_nvfp4", B200, {"n": 72}, "needs N divisible by 16 and K by 32 (N=72, K=128)"),
    ("a4w4_nvfp4", B200, {"k": 48}, "needs N divisible by 16 and K by 32 (N=64, K=48)"),
    ("a8w8_mxfp8", B200, {"k": 32}, ""),
])  # fmt: skip
def test_refusals_of_cublaslts_product(op, device, fields, reason):
    """The route is refused with its requirement."""
    assert family.routes["scaled_mm"].unfit(shape(op, **fields), device) == reason


def test_a_torch_without_the_function(monkeypatch):
    """An older torch is named."""
    monkeypatch.delattr(torch.nn.functional, "scaled_mm")
    assert family.routes["scaled_mm"].unfit(shape("a8w8_mxfp8"), B200) == "needs a torch with torch.nn.functional.scaled_mm"


def as_cublaslt(x, weight, *scales_and_kinds, output_dtype):
    """Compute what torch documents for its arguments, from their memory; the weight is a transposed view."""
    x_scales, x_kinds, w_scales, w_kinds, x_swizzle, w_swizzle = scales_and_kinds
    is_fp4 = x.dtype == torch.float4_e2m1fn_x2
    form, kind = FORMATS["nvfp4" if is_fp4 else "mxfp8"], ScalingType.BlockWise1x16 if is_fp4 else ScalingType.BlockWise1x32
    assert x_kinds == w_kinds == [kind, ScalingType.TensorWise][: 1 + is_fp4]
    assert x_swizzle == w_swizzle == [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE][: 1 + is_fp4]
    assert x.is_contiguous() and weight.t().is_contiguous() and weight.dtype == x.dtype
    product = []
    for values, scales in ((x, x_scales), (weight.t(), w_scales)):
        assert scales[0].is_contiguous() and scales[0].dtype == (torch.float8_e4m3fn if is_fp4 else torch.float8_e8m0fnu)
        rows, groups = len(values), values.shape[1] * form.per // form.groups[0]
        assert scales[0].numel() == -(-rows // 128) * 128 * (-(-groups // 4) * 4)
        product.append(decode(form, Weight(values, unswizzle_scale(scales[0], rows, groups)), torch.float64))
    factors = [float(scales[1]) for scales in (x_scales, w_scales)] if is_fp4 else [1.0, 1.0]
    return (product[0] @ product[1].t() * factors[0] * factors[1]).to(output_dtype)


@pytest.mark.parametrize("op", NAMES)
@pytest.mark.parametrize("order", ["row", "128x4", "8x4"])
@pytest.mark.parametrize(("outdtype", "bias"), [("bf16", ""), ("fp32", ""), ("fp16", "fp16"), ("bf16", "fp32")])
def test_operands_of_cublaslts_product(op, order, outdtype, bias, monkeypatch):
    """Scales arrive in tiles, global scales with their kinds, and the bias follows in float32."""
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", as_cublaslt)
    extra = {} if order == "row" else {"scale_order": order}
    which = shape(op, 6, 48, 160, outdtype=outdtype, epilogue="bias" if bias else "none", bias_dtype=bias, extra=extra)
    x, *rest = op_named(op).make_inputs(which, torch.device("cpu"), 0)
    wanted = op_named(op).reference(which, (x, *rest))
    x = x.view(torch.uint8).view(2, 3, -1).view(x.dtype) if op == "a8w8_mxfp8" else x.view(torch.uint8).view(2, 3, -1)
    out = family.routes["scaled_mm"].make(which, B200)(x, *rest)
    assert (out.shape, out.dtype) == ((2, 3, 48), torch_dtype(outdtype))
    assert worst_row_error(out, wanted) < {"fp32": 1e-7, "fp16": 4e-4, "bf16": 3e-3}[outdtype]


@pytest.mark.parametrize("op", NAMES)
def test_products_of_a_gpu_in_bf16(op, monkeypatch):
    """Global scales and the bias follow the float32 product, which a CPU's torch lacks."""
    monkeypatch.setattr(torch, "mm", lambda x, weight, out_dtype: torch.matmul(x.float(), weight.float()).to(out_dtype))
    which = shape(op, 6, 24, 96, outdtype="fp32", epilogue="bias", bias_dtype="bf16")
    operands = op_named(op).make_inputs(which, torch.device("cpu"), 0)
    assert worst_row_error(family.routes["bf16"].make(which, H200)(*operands), op_named(op).reference(which, operands)) < 1e-6


def test_every_value_times_its_scale_is_exact():
    """bf16 holds all products of nvfp4, and of mxfp8 with scales from 2^-124 to 2^119, but no others."""
    bytes_ = torch.arange(256).to(torch.uint8)
    scales = bytes_[:, None].view(torch.float8_e4m3fn)
    codes = (bytes_[:8] * 0x11).expand(256, 8)
    for part in (codes, codes + 0x88):
        wide = decode(FORMATS["nvfp4"], Weight(part, scales), torch.float64)
        assert torch.equal(decode(FORMATS["nvfp4"], Weight(part, scales), torch.bfloat16).double().nan_to_num(), wide.nan_to_num())
    values = bytes_.view(1, 8, 32).expand(256, 8, 32).reshape(-1, 32).view(torch.float8_e4m3fn)
    powers = bytes_[:, None].expand(256, 8).reshape(-1, 1)
    stored, dtypes = Weight(values, powers), (torch.float64, torch.bfloat16)
    wide, narrow = (decode(FORMATS["mxfp8"], stored, dtype).double().nan_to_num(0.0) for dtype in dtypes)
    exact = (wide == narrow).view(256, -1).all(1)
    assert exact[3:247].all() and not exact[:3].any() and not exact[247:255].any()
