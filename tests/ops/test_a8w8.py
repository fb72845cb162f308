"""a8w8: operands, scales by row and by tensor, columns, reference and AITER's function."""

import re

import attrs
import pytest
import torch
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.errors import OperandError
from tunedgemm.ops import op_named
from tunedgemm.ops.accuracy import worst_row_error
from tunedgemm.ops.formats.shuffle import shuffle_weight
from tunedgemm.shape import Shape
from tunedgemm.testing.listed import listed

OP = op_named("a8w8")
CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn


def int8(*sizes, device=None):
    return torch.ones(*sizes, dtype=torch.int8, device=device)


def scale(*sizes, dtype=torch.float32, device=None):
    return torch.ones(sizes, dtype=dtype, device=device)


class TestShapeOf:
    """From the operands of a call to its shape."""

    @listed("x_scale", [(6,), (6, 1), (2, 3, 1)], ids=str)
    @listed("w_scale", [(4,), (4, 1), (1, 4)], ids=str)
    def test_scales_by_row(self, x_scale, w_scale):
        """Scales have a value for each row of x and of the weight, in any form."""
        shape = OP.shape_of(int8(2, 3, 8), int8(4, 8), scale(*x_scale), scale(*w_scale))
        assert shape == Shape("a8w8", 6, 4, 8, "int8", "bf16", scale="row")

    @listed("sizes", [(), (1,), (1, 1)], ids=str)
    def test_scales_of_the_whole_tensor(self, sizes):
        """One value for each operand is a scale of the tensor."""
        assert OP.shape_of(int8(6, 8), int8(4, 8), scale(*sizes), scale(*sizes)).scale == "tensor"

    def test_one_row(self):
        """One row of activations or of weight has one scale
        and is still a product with row scales."""
        assert OP.shape_of(int8(8), int8(4, 8), scale(1), scale(4)).scale == "row"
        assert OP.shape_of(int8(6, 8), int8(1, 8), scale(6), scale(1)).scale == "row"
        assert OP.shape_of(int8(1, 8), int8(1, 8), scale(1), scale(1)).scale == "row"
        assert OP.shape_of(int8(0, 8), int8(4, 8), scale(0, 1), scale(4)).scale == "row"

    def test_dtypes_and_bias(self):
        """The dtype of operands, output and bias are fields; the output is bf16 by default."""
        operands = (torch.ones(2, 8).to(FP8), torch.ones(4, 8).to(FP8), scale(2, 1), scale(4, 1))
        assert OP.shape_of(*operands) == Shape("a8w8", 2, 4, 8, "fp8_e4m3fn", "bf16", scale="row")
        with_bias = OP.shape_of(*operands, scale(1, 4, dtype=torch.float16), otype=torch.float32)
        assert with_bias == Shape("a8w8", 2, 4, 8, "fp8_e4m3fn", "fp32", "bias", "fp16", "row")

    @listed(
        ("operands", "message"),
        [
            ((int8(2, 8), int8(4), scale(2), scale(4)), "the weight must be 2-D [N, K] (x (2, 8) torch.int8, weight (4,) torch.int8)"),
            ((int8(2, 8), int8(4, 9), scale(2), scale(4)), "pad x with zeros to K=9"),
            ((int8(2, 9), int8(4, 8), scale(2), scale(4)), "the last dimension of x must equal that of the [N, K] weight"),
            ((int8(2, 8), int8(8, 4), scale(2), scale(8)), "a [K, N] weight must be passed as weight.t().contiguous()"),
            ((int8(2, 8), int8(4, 8).to(FP8), scale(2), scale(4)), "must both be one of torch.int8, torch.float8_e4m3fn"),
            ((scale(2, 8), scale(4, 8), scale(2), scale(4)), "got x torch.float32, weight torch.float32"),
            ((int8(2, 8), int8(4, 8, device="meta"), scale(2), scale(4)), "x is on cpu and weight on meta"),
            ((int8(2, 8), int8(4, 8), scale(3), scale(4)), "x_scale must be [2] or [2, 1], torch.float32 on cpu (got (3,)"),
            ((int8(2, 8), int8(4, 8), scale(2), scale(4, 2)), "w_scale must be [4] or [4, 1] or [1, 4], torch.float32 on cpu (got (4, 2)"),
            ((int8(2, 8), int8(4, 8), scale(1), scale(4)), "pass x_scale.reshape(1, 1).expand(2, 1).contiguous()"),
            ((int8(2, 8), int8(4, 8), scale(2), scale(1)), "pass w_scale.reshape(1, 1).expand(4, 1).contiguous()"),
            ((int8(2, 8), int8(4, 8), scale(2, dtype=torch.bfloat16), scale(4)), "x_scale must be torch.float32 (got torch.bfloat16)"),
            ((int8(2, 8), int8(4, 8), scale(1), scale(1, dtype=torch.float64)), "w_scale must be torch.float32 (got torch.float64)"),
            ((int8(2, 8), int8(4, 8), scale(2, device="meta"), scale(4)), "x_scale must be on cpu, as x"),
            ((int8(2, 8), int8(4, 8), scale(2), scale(4), scale(2)), "bias must be [4] or [1, 4]"),
            (
                (int8(2, 8), int8(4, 8), scale(2), scale(4), int8(4)),
                "torch.bfloat16, torch.float16, torch.float32 on cpu (got (4,) torch.int8",
            ),
        ],
    )
    def test_operands_that_do_not_fit(self, operands, message):
        """Each error names the op, the operand, the given value and the valid one."""
        with pytest.raises(OperandError, match=f"^a8w8: .*{re.escape(message)}"):
            OP.shape_of(*operands)

    def test_an_impossible_output_dtype(self):
        """The output must be bf16, fp16 or fp32."""
        with pytest.raises(OperandError, match=r"the output must be one of torch.bfloat16, torch.float16, torch.float32 \(got torch.int8"):
            OP.shape_of(int8(2, 8), int8(4, 8), scale(2), scale(4), otype=torch.int8)

    def test_a_shuffled_weight_belongs_to_the_other_function(self):
        """The error names the right function, and unshuffling."""
        weight = shuffle_weight(int8(32, 32), (32, 16))
        with pytest.raises(
            OperandError, match=r"must be plain \(got layout aiter32x16\); call gemm_a8w8_bpreshuffle, or pass unshuffle_weight"
        ):
            OP.shape_of(int8(2, 32), weight, scale(2), scale(32))


class TestColumns:
    """From a row of AITER's tables to a shape, and back."""

    def test_a_row_of_aiter(self):
        """M, N, K and the weight's dtype mean scales by row, bf16 out and no bias."""
        row = {"M": "16", "N": "512", "K": "7168", "q_dtype_w": "torch.float8_e4m3fnuz"}
        shape = OP.columns.parse(row)
        assert shape == Shape("a8w8", 16, 512, 7168, "fp8_e4m3fnuz", "bf16", scale="row")
        assert {name: text for name, text in OP.columns.format(shape).items() if text} == row

    def test_untuned_rows_without_a_dtype_are_int8(self):
        """As AITER's files were before it had fp8; its filler 0 stands for an absent cell."""
        assert OP.columns.parse({"M": "1", "N": "2", "K": "3"}).dtype == "int8"
        row = {"M": "1", "N": "2", "K": "3", "q_dtype_w": "0", "scale": "0", "outdtype": "0", "bias": "0"}
        assert OP.columns.parse(row) == OP.columns.parse({"M": "1", "N": "2", "K": "3"})


class TestReference:
    """The exact result that everything is compared with."""

    @listed("x_scale", [(2,), (2, 1)], ids=str)
    @listed("w_scale", [(3,), (3, 1), (1, 3)], ids=str)
    def test_scales_by_row_and_bias(self, x_scale, w_scale):
        """(x @ weight.T) * x_scale[:, None] * w_scale[None, :] + bias[None, :], whatever form the scales have."""
        scales = torch.tensor([0.5, 2.0]).reshape(x_scale), torch.tensor([1.0, 10.0, 100.0]).reshape(w_scale)
        shape = Shape("a8w8", 2, 3, 4, "int8", "bf16", "bias", scale="row")
        out = OP.reference(shape, (int8(2, 4), int8(3, 4), *scales, torch.tensor([1.0, 2.0, 3.0])))
        assert out.tolist() == [[3.0, 22.0, 203.0], [9.0, 82.0, 803.0]]

    def test_sums_beyond_what_float32_holds(self):
        """Sums of int8 products are exact where float32's 24 bits are not enough."""
        x, weight = torch.full((1, 4097), 127, dtype=torch.int8), torch.full((1, 4097), 127, dtype=torch.int8)
        weight[0, 0] = 126
        out = OP.reference(Shape("a8w8", 1, 1, 4097, "int8", "fp32", scale="tensor"), (x, weight, scale(1), scale(1)))
        assert out.item() == 127 * 127 * 4096 + 127 * 126


def test_bytes_moved():
    """Each operand and the output count once, and a scale four bytes."""
    shape = Shape("a8w8", 2, 4, 8, "int8", "fp32", "bias", "fp16", "row")
    assert OP.bytes_moved(shape) == (2 + 4) * 8 + (2 + 4) * 4 + 4 * 2 + 2 * 4 * 4
    assert OP.bytes_moved(attrs.evolve(shape, scale="tensor")) == (2 + 4) * 8 + 2 * 4 + 4 * 2 + 2 * 4 * 4


class TestFunction:
    """AITER's gemm_a8w8."""

    @listed("name", ["gemm_a8w8", "gemm_a8w8_CK"])
    def test_aiters_arguments(self, name):
        """XQ, WQ, x_scale, w_scale, bias, dtype and splitK work by position or name; leading
        dimensions are kept."""
        shape = Shape("a8w8", 6, 16, 32, "int8", "fp16", "bias", scale="row")
        x, weight, x_scale, w_scale, bias = OP.make_inputs(shape, CPU, 0)
        call = getattr(TunedGemm(), name)
        out = call(x.view(2, 3, 32), weight, x_scale, w_scale, bias, torch.float16, 4)
        assert (out.shape, out.dtype) == ((2, 3, 16), torch.float16)
        assert worst_row_error(out, OP.reference(shape, (x, weight, x_scale, w_scale, bias))) <= OP.tolerance(shape).row_error
        assert torch.equal(call(x, weight, x_scale, w_scale, bias=bias, dtype=torch.float16, splitK=0), out.view(6, 16))

    def test_the_default_output_is_bf16(self):
        """None is AITER's default."""
        operands = OP.make_inputs(Shape("a8w8", 2, 16, 32, "int8", "bf16", scale="row"), CPU, 0)
        call = TunedGemm().gemm_a8w8
        assert call(*operands, dtype=None).dtype == call(*operands).dtype == torch.bfloat16
