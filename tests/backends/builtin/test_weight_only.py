"""Routes of a16wn: which one a device takes, and the products of a GPU."""

import pytest
import torch
from tunedgemm.backends.builtin.weight_only import family
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
    """The weight is decoded to x's dtype, or to float32 beyond its range or precision."""
    cases = {
        ("gptq_int4", 32, "bf16", "bf16"): "decoded", ("gptq_int4", 32, "bf16", "fp32"): "float32",
        ("nvfp4", 16, "bf16", "fp32"): "decoded", ("nvfp4", 16, "fp16", "fp16"): "decoded",
        ("mxfp8", 32, "bf16", "fp32"): "decoded", ("mxfp8", 32, "fp16", "fp16"): "float32",
    }  # fmt: skip
    found = {case: family.native(shape(4, 64, 128, *case[:2], dtype=case[2], outdtype=case[3]), H200) for case in cases}
    assert found == cases


@listed(("device", "fields", "reason"), [
    (H200, {"w_format": "mxfp8", "group": 32, "dtype": "fp16"}, "has less range than scales in e8m0"),
    (H200, {"w_format": "gptq_int4", "group": 32, "outdtype": "fp32"}, "rounds values of gptq_int4, too coarse for fp32"),
    (CPU, {"w_format": "nvfp4", "group": 16}, "rounds to bf16 on a CPU before the global scale, bias and output"),
    (CPU, {"w_format": "gptq_int4", "group": 32}, ""),
])  # fmt: skip
def test_refusals_of_the_dtype_of_x(device, fields, reason):
    """A route is refused with its requirement."""
    assert family.routes["decoded"].unfit(shape(4, 64, 128, **fields), device) == reason


@pytest.mark.parametrize(("w_format", "group", "dtype"), [("nvfp4", 16, "bf16"), ("nvfp4", 16, "fp16"), ("mxfp8", 32, "bf16")])
def test_products_of_a_gpu_in_float32(w_format, group, dtype, monkeypatch):
    """The global scale and the bias follow the float32 product, which a CPU's torch lacks."""
    monkeypatch.setattr(torch, "mm", lambda x, weight, out_dtype: torch.matmul(x.float(), weight.float()).to(out_dtype))
    which = shape(6, 24, 64, w_format, group, dtype=dtype, outdtype="fp32", epilogue="bias", bias_dtype="bf16")
    operands = OP.make_inputs(which, torch.device("cpu"), 0)
    out = family.routes["decoded"].make(which, H200)(operands[0].view(2, 3, 64), *operands[1:])
    assert (out.shape, out.dtype) == ((2, 3, 24), torch.float32)
    assert worst_row_error(out, OP.reference(which, operands)) < 1e-6
