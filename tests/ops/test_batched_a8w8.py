"""batched_a8w8: operands, columns, reference and functions of the batched product in 8 bits."""

from pathlib import Path

import pytest
import torch
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.errors import OperandError, ShapeError
from tunedgemm.ops import op_named
from tunedgemm.ops.formats.shuffle import shuffle_weight
from tunedgemm.shape import Shape
from tunedgemm.testing.listed import listed
from tunedgemm.tuner.accuracy import worst_row_error

OP = op_named("batched_a8w8")
INT8, FP8, CPU = torch.int8, torch.float8_e4m3fn, torch.device("cpu")
CONFIGS = Path(__file__).parents[3] / "shared" / "aiter" / "configs"


def whole(*sizes, dtype=INT8, device=None):
    return torch.ones(*sizes, device=device).to(dtype)


def scale(*sizes, dtype=torch.float32, device=None):
    return torch.ones(*sizes, dtype=dtype, device=device)


def plain(m=4, n=5, k=8, b=3, **fields):
    return Shape("batched_a8w8", m, n, k, **{"dtype": "int8", "outdtype": "bf16", "scale": "row", **fields}, extra={"B": b})


X, W, S, T = whole(3, 4, 8), whole(3, 5, 8), scale(3, 4, 1), scale(3, 5, 1)


class TestShapeOf:
    """From the operands of a call to its shape."""

    @listed("x_sizes", [(3, 4, 1), (3, 4)])
    @listed("w_sizes", [(3, 1, 5), (3, 5, 1), (3, 5)])
    def test_scales_in_every_form(self, x_sizes, w_sizes):
        """One float32 value for each row of x and of the weight, however it is laid out."""
        assert OP.shape_of(X, W, scale(*x_sizes), scale(*w_sizes)) == plain()

    def test_dtypes_and_bias(self):
        """int8 or fp8 in; out is bf16 by default;
        a bias has a float dtype, by default the output's."""
        fp8 = OP.shape_of(whole(3, 4, 8, dtype=FP8), whole(3, 5, 8, dtype=FP8), S, T, otype=torch.float16)
        assert fp8 == plain(dtype="fp8_e4m3fn", outdtype="fp16")
        biased = OP.shape_of(X, W, S, T, scale(3, 5))
        assert biased == plain(epilogue="bias", bias_dtype="fp32")
        assert plain(epilogue="bias").bias_dtype == "bf16"

    @listed(
        ("operands", "message"),
        [
            ((X, W, scale(4, 1), T), r"x_scale must be \[3, 4, 1\] or \[3, 4\], torch.float32 on cpu \(got \(4, 1\)"),
            ((X, W, scale(1), T), "x_scale must be .*one value for all rows must be expanded"),
            ((X, W, None, T), "x_scale must be .*got NoneType"),
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
            OP.shape_of(*operands)


class TestColumns:
    """From a row of AITER's table to a shape, and back."""

    def test_aiters_rows_are_int8_with_bf16_out(self):
        """B, M, N and K are all that AITER's key tells."""
        row = {"B": "3", "M": "4", "N": "5", "K": "8"}
        assert OP.columns.parse(row) == plain()
        assert OP.columns.format(plain()) == {**row, "dtype": "", "outdtype": "", "bias": ""}

    @listed("shape", [plain(dtype="fp8_e4m3fnuz"), plain(outdtype="fp32", epilogue="bias")], ids=str)
    def test_round_trip(self, shape):
        """Our columns hold the fields that the key lacks."""
        assert OP.columns.parse(OP.columns.format(shape)) == shape

    def test_a_dtype_of_another_family(self):
        """A dtype that the op does not take is named with those it takes."""
        with pytest.raises(ShapeError, match="'dtype' must be one of int8, fp8_e4m3fn, fp8_e4m3fnuz"):
            OP.columns.parse({"B": "3", "M": "4", "N": "5", "K": "8", "dtype": "bf16"})


def test_equivalent_shapes_end_with_aiters_row():
    """A call of another dtype or with a bias looks for its own row, then for AITER's."""
    other = plain(dtype="fp8_e4m3fn", outdtype="fp16", epilogue="bias")
    assert OP.equivalent_shapes(other) == (other, plain())


@listed(("x_sizes", "w_sizes"), [((2, 2, 1), (2, 1, 1)), ((2, 2), (2, 1))])
def test_reference(x_sizes, w_sizes):
    """Each row's product is scaled by its own scales, and the bias comes after them."""
    x = torch.tensor([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], dtype=INT8)
    weight = torch.tensor([[[10, 1]], [[100, 1]]], dtype=INT8)
    x_scale, w_scale = torch.tensor([1.0, 2.0, 4.0, 8.0]).view(x_sizes), torch.tensor([0.5, 0.25]).view(w_sizes)
    out = OP.reference(plain(2, 1, 2, 2), (x, weight, x_scale, w_scale, torch.tensor([[0.5], [1.0]])))
    assert out.flatten().tolist() == [12 * 0.5 + 0.5, 34 * 2 * 0.5 + 0.5, 506 * 4 * 0.25 + 1, 708 * 8 * 0.25 + 1]


def test_work():
    """Operations and bytes of all batches, scales and bias among them."""
    shape = plain(2, 4, 8, 3, epilogue="bias")
    assert OP.flops(shape) == 3 * 2 * 2 * 4 * 8
    assert OP.bytes_moved(shape) == 3 * ((2 * 8 + 4 * 8) + 4 * (2 + 4) + 2 * 4 + 2 * 2 * 4)


class TestFunctions:
    """AITER's functions over a dispatcher."""

    def test_both_names(self):
        """The op names its public functions, and both names are one function."""
        functions = OP.entry(Dispatcher(OP))
        assert set(functions) == set(OP.functions)
        assert functions["batched_gemm_a8w8"] is functions["batched_gemm_a8w8_CK"]

    @listed("shape", [plain(4, 16, 32), plain(4, 16, 32, dtype="fp8_e4m3fn", epilogue="bias")], ids=str)
    def test_the_result(self, shape):
        """The scaled product in bf16, or in the requested dtype; splitK changes nothing."""
        dispatcher = Dispatcher(OP)
        call = OP.entry(dispatcher)["batched_gemm_a8w8"]
        operands = OP.make_inputs(shape, CPU, 0)
        reference = OP.reference(shape, operands)
        assert worst_row_error(call(*operands, splitK=2), reference) <= OP.tolerance(shape).row_error
        assert call(*operands).dtype == call(*operands, dtype=None).dtype == torch.bfloat16
        assert call(*operands, dtype=torch.float16).dtype == torch.float16
        assert len(dispatcher.launchers) == 3

    def test_one_row_with_the_strides_of_a_column(self):
        """A batch's one row that is a view of a column is multiplied as any other."""
        x, weight = torch.randint(-20, 20, (2, 64, 1), dtype=INT8).permute(0, 2, 1), torch.randint(-20, 20, (2, 128, 64), dtype=INT8)
        scales = torch.rand(2, 1, 1), torch.rand(2, 1, 128)
        expected = (x.double() @ weight.double().mT) * scales[0] * scales[1]

        out = OP.entry(Dispatcher(OP))["batched_gemm_a8w8"](x, weight, *scales)

        assert (x[0].stride(), x.is_contiguous()) == ((1, 1), True)
        assert (out.double() - expected).norm() < 0.01 * expected.norm()
