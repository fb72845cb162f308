"""a16w16: operands, columns and reference of the plain GEMM."""

import attrs
import pytest
import torch
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import DtypeError, OperandError
from tunedgemm.ops import op_named
from tunedgemm.ops.accuracy import errors
from tunedgemm.shape import Shape
from tunedgemm.testing.listed import listed

OP = op_named("a16w16")
BF16 = torch.bfloat16


def ones(*sizes, dtype=BF16, device=None):
    return torch.ones(*sizes, dtype=dtype, device=device)


class TestShapeOf:
    """From the operands of a call to its shape."""

    def test_leading_dimensions_are_multiplied(self):
        """M is the product of all dimensions of x but the last, one for a vector."""
        assert OP.shape_of(ones(2, 3, 8), ones(4, 8)) == Shape("a16w16", 6, 4, 8)
        assert OP.shape_of(ones(8), ones(4, 8)).m == 1
        assert OP.shape_of(ones(2, 0, 8), ones(4, 8)).m == 0

    def test_dtypes_bias_and_scales(self):
        """The output dtype, the bias and its dtype, and the presence of scales are fields."""
        plain = OP.shape_of(ones(2, 8), ones(4, 8), ones(4, dtype=torch.float32), otype=torch.float32)
        assert plain == Shape("a16w16", 2, 4, 8, "bf16", "fp32", "bias", "fp32")
        scaled = OP.shape_of(ones(2, 8), ones(4, 8), None, ones(1), None)
        assert scaled == Shape("a16w16", 2, 4, 8, scale="tensor")

    @listed(
        ("operands", "message"),
        [
            ((ones(2, 8), ones(4)), r"the weight must be 2-D \[N, K\]"),
            ((ones(2, 8), ones(4, 9)), r"last dimension of x must equal .*x \(2, 8\) torch.bfloat16, weight \(4, 9\)"),
            ((ones(2, 8), ones(8, 4)), r"a \[K, N\] weight must be passed as weight.t\(\).contiguous\(\)"),
            ((ones(2, 8), ones(4, 8).t()), r"a transposed view: pass the \[N, K\] weight itself, without .t\(\)"),
            ((torch.tensor(1.0), ones(8, 4)), "last dimension of x"),
            ((ones(2, 8), ones(4, 8, dtype=torch.float16)), "x and weight must have one dtype"),
            ((ones(2, 8), ones(4, 8, device="meta")), "x is on cpu and weight on meta"),
            ((ones(2, 8), ones(4, 8), ones(8)), r"bias must be \[4\] on cpu \(got \(8,\) on cpu\)"),
            ((ones(2, 8), ones(4, 8), ones(4, device="meta")), r"bias must be \[4\] on cpu \(got \(4,\) on meta\)"),
            ((ones(2, 8), ones(4, 8), None, ones(2)), r"scale_a must hold one value \(got \(2,\)\); see the a8w8 ops"),
            ((ones(2, 8), ones(4, 8), None, ones(1, device="meta")), r"scale_a must be .* on cpu \(got \(1,\) torch.bfloat16 on meta"),
            ((ones(2, 8), ones(4, 8), None, None, ones(1, dtype=torch.int64)), "scale_b must be torch.bfloat16, .*got .*int64"),
        ],
    )
    def test_operands_that_do_not_fit(self, operands, message):
        """Each mistake is named with the sizes that were given."""
        with pytest.raises(OperandError, match=message):
            OP.shape_of(*operands)
        bias, *scales = (*operands[2:], None, None, None)[:3]
        with pytest.raises(OperandError, match=message):
            OP.entry(Dispatcher(OP))["gemm_a16w16"](*operands[:2], bias, None, *scales)

    def test_a_dtype_outside_the_list(self):
        """Complex operands are refused."""
        with pytest.raises(DtypeError, match="complex64"):
            OP.shape_of(ones(2, 8, dtype=torch.complex64), ones(4, 8, dtype=torch.complex64))


@pytest.mark.parametrize("outdtype", ["fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2", "fp8_e5m2fnuz"])
def test_rounding_to_fp8_is_inside_the_tolerance(outdtype):
    """The exact product, rounded to an output of fp8, passes; one rounded to half of its digits does not."""
    shape = Shape("a16w16", 16, 128, 384, "bf16", outdtype)
    exact = OP.reference(shape, OP.make_inputs(shape, torch.device("cpu"), 0))
    ratio, row = errors(exact.to(torch_dtype(outdtype)), exact, OP.tolerance(shape))
    assert (ratio, row <= OP.tolerance(shape).row_error) == (0, True)
    coarse = exact.sign() * exact.abs().log2().round().exp2()
    assert errors(coarse, exact, OP.tolerance(shape))[1] > OP.tolerance(shape).row_error


def test_fp8_in_float32_has_the_bound_of_hoppers_sums():
    """2^-11, as in the other ops of fp8; bf16 products in float32 have 2^-12."""
    fp8 = Shape("a16w16", 4, 16, 32, "fp8_e4m3fn", "fp32", scale="tensor")
    assert OP.tolerance(fp8) == op_named("a8w8").tolerance(attrs.evolve(fp8, op="a8w8"))
    assert (OP.tolerance(fp8).row_error, OP.tolerance(Shape("a16w16", 4, 16, 32, "bf16", "fp32")).row_error) == (2**-11, 2**-12)


class TestColumns:
    """From a row of AITER's tables to a shape, and back."""

    def test_a_full_row(self):
        """Every column of AITER's key has its field."""
        row = dict(zip(OP.columns.key, ["16", "512", "7168", "True", "torch.bfloat16", "torch.float32", "True", "True"], strict=True))
        shape = OP.columns.parse(row)
        assert shape == Shape("a16w16", 16, 512, 7168, "bf16", "fp32", "bias", scale="tensor", layout="aiter16x16")
        assert {name: OP.columns.format(shape)[name] for name in row} == row


class TestReference:
    """The exact result that everything is compared with."""

    def test_bias_and_scales(self):
        """(x @ weight.T) * scale_a * scale_b + bias, then * scale_c."""
        shape = Shape("a16w16", 2, 3, 4, epilogue="bias", scale="tensor")
        scales = [torch.tensor([value]) for value in (0.5, 4.0, 10.0)]
        out = OP.reference(shape, (ones(2, 4), ones(3, 4), ones(3), *scales))
        assert torch.equal(out, torch.full((2, 3), 90.0, dtype=torch.float64))

    @listed("before", [True, False])
    def test_tf32_is_unchanged(self, before):
        """The process's TF32 switch is put back, also where the product fails."""
        switch = torch.backends.cuda.matmul
        held, switch.allow_tf32 = switch.allow_tf32, before
        try:
            OP.reference(Shape("a16w16", 2, 3, 4), (ones(2, 4), ones(3, 4)))
            assert switch.allow_tf32 is before
            with pytest.raises(RuntimeError):
                OP.reference(Shape("a16w16", 2, 3, 4), (ones(2, 5), ones(3, 4)))
            assert switch.allow_tf32 is before
        finally:
            switch.allow_tf32 = held


def test_bytes_moved():
    """Each operand and the output count once, in their own dtypes."""
    shape = Shape("a16w16", 2, 4, 8, epilogue="bias", bias_dtype="fp32", outdtype="fp32")
    assert OP.bytes_moved(shape) == 2 * (2 * 8 + 4 * 8) + 4 * 4 + 4 * (2 * 4)
    assert OP.bytes_moved(attrs.evolve(shape, dtype="fp8")) == (2 * 8 + 4 * 8) + 4 * 4 + 4 * (2 * 4)
