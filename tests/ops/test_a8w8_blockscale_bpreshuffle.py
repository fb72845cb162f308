"""a8w8_blockscale_bpreshuffle: a shuffled weight, and scales of x that lie transposed in memory."""

import attrs
import pytest
import torch
from tunedgemm import transposed_scale, untransposed_scale
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.errors import OperandError
from tunedgemm.ops import op_named
from tunedgemm.ops.accuracy import worst_row_error
from tunedgemm.ops.formats.shuffle import ShuffledWeight, shuffle_weight
from tunedgemm.shape import Shape

OP = op_named("a8w8_blockscale_bpreshuffle")
PLAIN = op_named("a8w8_blockscale")
CPU = torch.device("cpu")
SHAPE = Shape("a8w8_blockscale_bpreshuffle", 6, 144, 288, "fp8_e4m3fn", "bf16", scale="block", layout="aiter16x16")
PLAIN_SHAPE = attrs.evolve(SHAPE, op="a8w8_blockscale", layout="row")


def fp8(*sizes):
    return torch.ones(*sizes).to(torch.float8_e4m3fn)


class TestShapeOf:
    """From the operands of a call to its shape."""

    @pytest.mark.parametrize(
        ("weight", "x_scale", "message"),
        [
            (fp8(144, 288), torch.ones(6, 3), r"pass shuffle_weight\(weight, \(16, 16\)\), .* or call gemm_a8w8_blockscale"),
            (shuffle_weight(fp8(144, 288)), torch.ones(3, 6), r"x_scale must be \[6, 3\].*got \(3, 6\)"),
            (
                shuffle_weight(fp8(144, 288)),
                torch.ones(3, 6).t(),
                r"x_scale must be contiguous.*strides \(1, 6\)\); pass transposed_scale\(x_scale\)",
            ),
            (
                shuffle_weight(fp8(144, 288)),
                torch.ones(6, 3).to(torch.float8_e8m0fnu),
                r"e8m0 scales are not taken here: pass x_scale.float\(\)",
            ),
        ],
    )
    def test_operands_that_do_not_fit(self, weight, x_scale, message):
        """A plain weight, and scales of ambiguous memory order, are refused."""
        with pytest.raises(OperandError, match=f"^a8w8_blockscale_bpreshuffle: .*{message}"):
            OP.shape_of(fp8(6, 288), weight, x_scale, torch.ones(2, 3))


def test_the_reference_is_that_of_plain_operands():
    """Shuffling and transposing move bytes and change no result."""
    x, weight, x_scale, w_scale = OP.make_inputs(SHAPE, CPU, 5)
    plain = PLAIN.make_inputs(PLAIN_SHAPE, CPU, 5)
    assert isinstance(weight, ShuffledWeight)
    assert x_scale.is_contiguous()
    assert torch.equal(x_scale.view(3, 6).t(), plain[2])
    reference = OP.reference(SHAPE, (x, weight, x_scale, w_scale))
    assert torch.equal(reference, PLAIN.reference(PLAIN_SHAPE, plain))
    # Scales that lie row by row, passed by mistake, are another product.
    assert worst_row_error(OP.reference(SHAPE, (x, weight, plain[2], w_scale)), reference) > 10 * OP.tolerance(SHAPE).row_error


class TestFunction:
    """AITER's gemm_a8w8_blockscale_bpreshuffle."""

    def test_aiters_arguments(self):
        """The function takes AITER's arguments, and scales of x as AITER makes them."""
        x, weight, plain_scale, w_scale = PLAIN.make_inputs(PLAIN_SHAPE, CPU, 0)
        reference = PLAIN.reference(PLAIN_SHAPE, (x, weight, plain_scale, w_scale))
        call = TunedGemm().gemm_a8w8_blockscale_bpreshuffle
        out = call(x.view(2, 3, 288), shuffle_weight(weight), transposed_scale(plain_scale), w_scale, torch.float16)
        assert (out.shape, out.dtype) == ((2, 3, 144), torch.float16)
        assert worst_row_error(out, reference) <= OP.tolerance(attrs.evolve(SHAPE, outdtype="fp16")).row_error
        # The same memory by the strides (1, M), as AITER's own test passes it, too.
        strided = call(x, shuffle_weight(weight), plain_scale.t().contiguous().t(), w_scale, torch.float16)
        assert torch.equal(strided, out.view(6, 144))

    def test_an_output_to_write_into_is_refused(self):
        """out= is refused by name."""
        operands = OP.make_inputs(SHAPE, CPU, 0)
        with pytest.raises(OperandError, match="out is not taken, the output is a new tensor"):
            TunedGemm().gemm_a8w8_blockscale_bpreshuffle(*operands, out=torch.empty(6, 144, dtype=torch.bfloat16))


@pytest.mark.parametrize(("m", "k"), [(1, 32), (16, 32), (16, 128), (1, 256), (5, 256)])
def test_transposed_scales_have_the_strides_of_their_shape(m, k):
    """Scales of one row or one block of K have the strides of a fresh tensor, as have the first rows."""
    shape = Shape(OP.name, m, 64, k, "fp8_e4m3fn", "bf16", scale="block", layout="aiter16x16")
    operands = OP.make_inputs(shape, torch.device("cpu"), 0)
    for scales in (operands[2], untransposed_scale(operands[2]), OP.first_rows(shape, operands, 1)[2]):
        assert scales.stride() == torch.empty(scales.shape).stride()
