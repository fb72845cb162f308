"""Batched products in 16 and in 8 bits: operands, columns, reference and functions."""

import pytest
import torch
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.errors import OperandError
from tunedgemm.ops import op_named
from tunedgemm.ops.accuracy import worst_row_error
from tunedgemm.ops.formats.shuffle import shuffle_weight
from tunedgemm.shape import Shape
from tunedgemm.testing.listed import listed

WIDE, NARROW = op_named("batched_bf16"), op_named("batched_a8w8")
BF16, FP16, INT8, FP8, CPU = torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn, torch.device("cpu")
ROW = {"B": "3", "M": "4", "N": "5", "K": "8"}


def ones(*sizes, dtype=BF16, device=None):
    return torch.ones(*sizes, device=device).to(dtype)


def whole(*sizes, dtype=INT8):
    return ones(*sizes, dtype=dtype)


def scale(*sizes, dtype=torch.float32, device=None):
    return ones(*sizes, dtype=dtype, device=device)


def wide(m=4, n=5, k=8, b=3, **fields):
    return Shape("batched_bf16", m, n, k, extra={"B": b}, **fields)


def narrow(m=4, n=5, k=8, b=3, **fields):
    return Shape("batched_a8w8", m, n, k, **{"dtype": "int8", "outdtype": "bf16", "scale": "row", **fields}, extra={"B": b})


X, W, S, T = whole(3, 4, 8), whole(3, 5, 8), scale(3, 4, 1), scale(3, 5, 1)
BOTH = pytest.mark.parametrize(("op", "plain"), [(WIDE, wide), (NARROW, narrow)], ids=["16 bits", "8 bits"])


class TestShapeOfWide:
    """From the operands of a call in 16 bits to its shape."""

    def test_batches_rows_and_columns(self):
        """B is the first dimension of both, M that of x, N that of the weight."""
        assert WIDE.shape_of(ones(3, 4, 8), ones(3, 5, 8)) == wide()
        assert WIDE.shape_of(ones(3, 0, 8), ones(3, 5, 8)).m == 0

    def test_dtypes_and_bias(self):
        """The output has x's dtype by default;
        a bias of either form and any float dtype is a field."""
        assert WIDE.shape_of(ones(3, 4, 8, dtype=FP16), ones(3, 5, 8, dtype=FP16)) == wide(dtype="fp16", outdtype="fp16")
        for sizes in ((3, 5), (3, 1, 5)):
            biased = WIDE.shape_of(ones(3, 4, 8), ones(3, 5, 8), ones(*sizes, dtype=torch.float32), otype=torch.float32)
            assert biased == wide(outdtype="fp32", epilogue="bias", bias_dtype="fp32")

    @listed(
        ("operands", "otype", "message"),
        [
            ((ones(4, 8), ones(3, 5, 8)), None, r"x must be 3-D \[B, M, K\] and the weight 3-D \[B, N, K\] \(x \(4, 8\)"),
            ((ones(3, 4, 8), ones(2, 5, 8)), None, r"the same B .*weight \(2, 5, 8\)"),
            ((ones(3, 4, 8), ones(3, 5, 9)), None, "last dimension of x must equal that"),
            ((ones(3, 4, 8), ones(3, 8, 5)), None, r"must be passed as weight.transpose\(1, 2\)"),
            ((ones(3, 4, 8), ones(3, 5, 8, dtype=FP16)), None, "must both be one of torch.bfloat16, torch.float16"),
            ((ones(3, 4, 8, dtype=torch.int8), ones(3, 5, 8, dtype=torch.int8)), None, "must both be one of"),
            ((ones(3, 4, 8), ones(3, 5, 8, device="meta")), None, "on one device .* on cpu, .* on meta"),
            ((ones(3, 4, 8), ones(3, 5, 8), ones(5)), None, r"bias must be \[3, 5\] or \[3, 1, 5\], .* on cpu \(got \(5,\)"),
            ((ones(3, 4, 8), ones(3, 5, 8), ones(3, 5, dtype=torch.int8)), None, "bias must be .*got .*torch.int8"),
            ((ones(3, 4, 8), ones(3, 5, 8)), torch.int8, r"the output must be one of .*got torch.int8"),
            ((ones(2, 4, 32), shuffle_weight(ones(2, 16, 32))), None, r"must be plain \(got layout aiter16x16\); pass unshuffle_weight"),
        ],
    )
    def test_operands_that_do_not_fit(self, operands, otype, message):
        """Each error names the given value."""
        with pytest.raises(OperandError, match=rf"batched_bf16: .*{message}"):
            WIDE.shape_of(*operands, otype=otype)


class TestShapeOfNarrow:
    """From the operands of a call in 8 bits to its shape."""

    @listed("x_sizes", [(3, 4, 1), (3, 4)])
    @listed("w_sizes", [(3, 1, 5), (3, 5, 1), (3, 5)])
    def test_scales_in_every_form(self, x_sizes, w_sizes):
        """One float32 value for each row of x and of the weight, however it is laid out."""
        assert NARROW.shape_of(X, W, scale(*x_sizes), scale(*w_sizes)) == narrow()

    def test_dtypes_and_bias(self):
        """int8 or fp8 in; out is bf16 by default;
        a bias has a float dtype, by default the output's."""
        fp8 = NARROW.shape_of(whole(3, 4, 8, dtype=FP8), whole(3, 5, 8, dtype=FP8), S, T, otype=torch.float16)
        assert fp8 == narrow(dtype="fp8_e4m3fn", outdtype="fp16")
        biased = NARROW.shape_of(X, W, S, T, scale(3, 5))
        assert biased == narrow(epilogue="bias", bias_dtype="fp32")
        assert narrow(epilogue="bias").bias_dtype == "bf16"

    @listed(
        ("operands", "message"),
        [
            ((X, W, scale(4, 1), T), r"x_scale must be \[3, 4, 1\] or \[3, 4\], torch.float32 on cpu \(got \(4, 1\)"),
            ((X, W, scale(1), T), "x_scale must be .*one value for all must be expanded"),
            ((X, W, S, scale(3, 4, 1)), r"w_scale must be \[3, 1, 5\] or \[3, 5, 1\] or \[3, 5\].*got \(3, 4, 1\)"),
            ((X, W, S, scale(3, 5, dtype=torch.float16)), "w_scale must be .*got .*torch.float16"),
            ((X, W, S, scale(3, 5, device="meta")), "w_scale must be .*on cpu .got .*on meta"),
            ((whole(3, 4, 8, dtype=FP8), W, S, T), "must both be one of torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz"),
            ((scale(3, 4, 8), scale(3, 5, 8), S, T), "must both be one of"),
            ((X, W, S, T, whole(3, 5)), "bias must be .*got .*torch.int8"),
            ((X[0], W, S, T), r"x must be 3-D"),
            ((whole(2, 4, 32), shuffle_weight(whole(2, 16, 32)), scale(2, 4), scale(2, 16)), "must be plain .*unshuffle_weight"),
        ],
    )
    def test_operands_that_do_not_fit(self, operands, message):
        """Each error names the given value."""
        with pytest.raises(OperandError, match=rf"batched_a8w8: .*{message}"):
            NARROW.shape_of(*operands)


class TestColumns:
    """From a row of AITER's table to a shape, and back."""

    @BOTH
    def test_aiters_key_has_defaults(self, op, plain):
        """B, M, N and K are a plain product, and are written as AITER writes them; its filler 0 says nothing."""
        assert op.columns.parse(ROW) == plain()
        assert op.columns.format(plain()) == {**ROW, "dtype": "", "outdtype": "", "bias": ""}
        assert op.columns.parse({**ROW, "dtype": "0", "outdtype": "0", "bias": "0"}) == plain()


def test_reference_in_16_bits():
    """Each batch has its own weight and bias, and sums are exact."""
    x = torch.tensor([[[256.0, 1.0]], [[1.0, 2.0]]], dtype=BF16)
    weight = torch.tensor([[[1.0, 1.0]], [[10.0, 100.0]]], dtype=BF16)
    out = WIDE.reference(wide(1, 1, 2, 2), (x, weight, torch.tensor([[0.5], [0.25]])))
    assert out.flatten().tolist() == [257.5, 210.25]


@listed(("x_sizes", "w_sizes"), [((2, 2, 1), (2, 1, 1)), ((2, 2), (2, 1))])
def test_reference_in_8_bits(x_sizes, w_sizes):
    """Each row's product is scaled by its own scales, and the bias comes after them."""
    x = torch.tensor([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], dtype=INT8)
    weight = torch.tensor([[[10, 1]], [[100, 1]]], dtype=INT8)
    x_scale, w_scale = torch.tensor([1.0, 2.0, 4.0, 8.0]).view(x_sizes), torch.tensor([0.5, 0.25]).view(w_sizes)
    out = NARROW.reference(narrow(2, 1, 2, 2), (x, weight, x_scale, w_scale, torch.tensor([[0.5], [1.0]])))
    assert out.flatten().tolist() == [12 * 0.5 + 0.5, 34 * 2 * 0.5 + 0.5, 506 * 4 * 0.25 + 1, 708 * 8 * 0.25 + 1]


def test_work():
    """Operations and bytes count all batches, scales and bias among them."""
    shape = wide(2, 4, 8, 3, epilogue="bias", bias_dtype="fp32", outdtype="fp32")
    assert WIDE.flops(shape) == NARROW.flops(narrow(2, 4, 8, 3)) == 3 * 2 * 2 * 4 * 8
    assert WIDE.bytes_moved(shape) == 3 * (2 * (2 * 8 + 4 * 8) + 4 * 4 + 4 * 2 * 4)
    assert NARROW.bytes_moved(narrow(2, 4, 8, 3, epilogue="bias")) == 3 * ((2 * 8 + 4 * 8) + 4 * (2 + 4) + 2 * 4 + 2 * 2 * 4)


class TestFunctions:
    """AITER's functions over a dispatcher."""

    @listed("bias", [False, True])
    def test_the_result_in_16_bits(self, bias):
        """The product in AITER's default dtype, in x's or in the requested one; the launcher is cached."""
        dispatcher = Dispatcher(WIDE)
        call = WIDE.entry(dispatcher)["batched_gemm_bf16"]
        shape = wide(4, 16, 32, dtype="fp16", epilogue="bias" if bias else "none")
        operands = WIDE.make_inputs(shape, CPU, 0)
        wanted = WIDE.reference(shape, operands)
        for dtype, out in ((torch.float32, torch.float32), (None, FP16)):
            found = call(*operands, dtype=dtype, splitK=3)
            assert found.dtype == out
            assert torch.allclose(found.double(), wanted, rtol=1e-2, atol=1e-2)
        assert call(*operands).dtype == BF16
        assert len(dispatcher.launchers) == 3
        assert torch.equal(call(*operands), call(*[operand.clone() for operand in operands]))
        assert len(dispatcher.launchers) == 3

    @listed("shape", [narrow(4, 16, 32), narrow(4, 16, 32, dtype="fp8_e4m3fn", epilogue="bias")], ids=str)
    def test_the_result_in_8_bits(self, shape):
        """The scaled product in bf16, or in the requested dtype; splitK changes nothing."""
        dispatcher = Dispatcher(NARROW)
        call = NARROW.entry(dispatcher)["batched_gemm_a8w8"]
        operands = NARROW.make_inputs(shape, CPU, 0)
        reference = NARROW.reference(shape, operands)
        assert worst_row_error(call(*operands, splitK=2), reference) <= NARROW.tolerance(shape).row_error
        assert call(*operands).dtype == call(*operands, dtype=None).dtype == torch.bfloat16
        assert call(*operands, dtype=torch.float16).dtype == torch.float16
        assert len(dispatcher.launchers) == 3

    def test_one_row_with_the_strides_of_a_column(self):
        """A batch's one row that is a view of a column is multiplied as any other."""
        x, weight = torch.randint(-20, 20, (2, 64, 1), dtype=INT8).permute(0, 2, 1), torch.randint(-20, 20, (2, 128, 64), dtype=INT8)
        scales = torch.rand(2, 1, 1), torch.rand(2, 1, 128)
        expected = (x.double() @ weight.double().mT) * scales[0] * scales[1]

        out = NARROW.entry(Dispatcher(NARROW))["batched_gemm_a8w8"](x, weight, *scales)

        assert (x[0].stride(), x.is_contiguous()) == ((1, 1), True)
        assert (out.double() - expected).norm() < 0.01 * expected.norm()
