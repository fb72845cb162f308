"""Routes of decoded operands: which one a device takes, and the products of a GPU."""

import torch
from tunedgemm.backends.builtin.decoding import weight_of_any_format as family
from tunedgemm.device import Device
from tunedgemm.ops import op_named
from tunedgemm.ops.accuracy import worst_row_error
from tunedgemm.shape import Shape
from tunedgemm.testing.listed import listed

OP = op_named("a16wn")
H200 = Device("sm_90", 132, "nvidia-h200")
CPU = Device("cpu-avx512", 1, "cpu", index=-1)


def shape(m, n, k, w_format, group, **fields):
    return Shape("a16wn", m, n, k, **{"outdtype": "bf16", "scale": "block", "extra": {"w_format": w_format, "w_group": group}, **fields})


def test_routes_on_an_h200():
    """The weight is decoded to x's dtype, or beyond its range or precision to bf16 or float32."""
    cases = {
        ("gptq_int4", 32, "bf16", "bf16"): "decoded", ("gptq_int4", 32, "bf16", "fp32"): "float32",
        ("nvfp4", 16, "bf16", "fp32"): "decoded", ("nvfp4", 16, "fp16", "fp16"): "decoded",
        ("mxfp8", 32, "bf16", "fp32"): "decoded", ("mxfp8", 32, "fp16", "fp16"): "halves",
        ("mxfp4", 32, "fp16", "fp32"): "halves", ("int8_channel", 0, "fp16", "fp16"): "float32",
    }  # fmt: skip
    found = {case: family.native(shape(4, 64, 128, *case[:2], dtype=case[2], outdtype=case[3]), H200) for case in cases}
    assert found == cases


@listed(("device", "fields", "reason"), [
    (H200, {"w_format": "mxfp8", "group": 32, "dtype": "fp16"}, "has less range than scales in e8m0"),
    (H200, {"w_format": "gptq_int4", "group": 32, "outdtype": "fp32"}, "rounds values of gptq_int4 to bf16, too coarse for fp32"),
    (CPU, {"w_format": "nvfp4", "group": 16}, "rounds to bf16 on a CPU before global scales"),
    (CPU, {"w_format": "mxfp4", "group": 32, "outdtype": "fp32"}, "rounds to bf16 on a CPU, too coarse for fp32"),
    (CPU, {"w_format": "gptq_int4", "group": 32}, ""),
])  # fmt: skip
def test_refusals_of_the_dtype_of_x(device, fields, reason):
    """A route is refused with its requirement."""
    assert family.routes["decoded"].unfit(shape(4, 64, 128, **fields), device) == reason


@listed(("name", "w_format", "group", "dtype"), [
    ("decoded", "nvfp4", 16, "bf16"), ("decoded", "nvfp4", 16, "fp16"), ("decoded", "mxfp8", 32, "bf16"), ("halves", "mxfp8", 32, "fp16"),
])  # fmt: skip
def test_products_of_a_gpu_in_float32(name, w_format, group, dtype, monkeypatch):
    """The global scale and the bias follow the float32 product, which a CPU's torch lacks."""
    monkeypatch.setattr(torch, "mm", lambda x, weight, out_dtype: torch.matmul(x.float(), weight.float()).to(out_dtype))
    which = shape(6, 24, 64, w_format, group, dtype=dtype, outdtype="fp32", epilogue="bias", bias_dtype="bf16")
    operands = OP.make_inputs(which, torch.device("cpu"), 0)
    assert not family.routes[name].unfit(which, H200)
    out = family.routes[name].make(which, H200)(operands[0].view(2, 3, 64), *operands[1:])
    assert (out.shape, out.dtype) == ((2, 3, 24), torch.float32)
    assert worst_row_error(out, OP.reference(which, operands)) < 1e-6


def test_a_bias_of_another_dtype_on_a_cpu():
    """A CPU rounds a product to the dtype of x, and again after a bias of another dtype."""
    which = shape(6, 24, 64, "gptq_int4", 32, dtype="fp16", outdtype="fp16", epilogue="bias", bias_dtype="fp32")
    operands = OP.make_inputs(which, torch.device("cpu"), 0)
    assert family.native(which, CPU) == "decoded"
    assert worst_row_error(family.routes["decoded"].make(which, CPU)(*operands), OP.reference(which, operands)) < 2.0**-11
