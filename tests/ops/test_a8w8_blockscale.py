"""a8w8_blockscale: block scales with tails, columns, reference and AITER's function."""

import re

import pytest
import torch
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.errors import OperandError
from tunedgemm.ops import op_named
from tunedgemm.ops.accuracy import worst_row_error
from tunedgemm.ops.formats.shuffle import shuffle_weight
from tunedgemm.shape import Shape
from tunedgemm.table.row import shape_cells
from tunedgemm.testing.listed import listed

OP = op_named("a8w8_blockscale")
CPU = torch.device("cpu")
INT8, E8M0 = torch.int8, torch.float8_e8m0fnu


def fp8(*sizes, dtype=torch.float8_e4m3fn, device=None):
    return torch.ones(*sizes, device=device).to(dtype)


SHUFFLED = shuffle_weight(fp8(16, 128))


def scale(*sizes, dtype=torch.float32, device=None):
    return torch.ones(*sizes, device=device).to(dtype)


class TestShapeOf:
    """From the operands of a call to its shape."""

    @listed("x_scale", [(6, 3), (2, 3, 3)], ids=str)
    def test_tails_and_leading_dimensions(self, x_scale):
        """The last blocks may be short, and scales of x may have its leading dimensions."""
        shape = OP.shape_of(fp8(2, 3, 300), fp8(130, 300), scale(*x_scale), scale(2, 3))
        assert shape == Shape("a8w8_blockscale", 6, 130, 300, "fp8_e4m3fn", "bf16", scale="block")

    @listed(
        ("operands", "message"),
        [
            ((fp8(2, 256), fp8(16, 128), scale(2, 2), scale(1, 2)), "the last dimension of x must equal that of the [N, K] weight"),
            ((fp8(2, 128, dtype=INT8), fp8(16, 128, dtype=INT8), scale(2, 1), scale(1, 1)), "torch.float8_e4m3fn, torch.float8_e4m3fnuz"),
            ((fp8(2, 256), fp8(16, 256), scale(2, 1), scale(1, 2)), "x_scale must be [2, 2], torch.float32 on cpu (got (2, 1)"),
            ((fp8(2, 256), fp8(16, 256), scale(2, 2).t()[:1], scale(1, 2)), "x_scale must be [2, 2]"),
            ((fp8(2, 256), fp8(130, 256), scale(2, 2), scale(1, 2)), "w_scale must be [2, 2], torch.float32 on cpu (got (1, 2)"),
            ((fp8(2, 128), fp8(16, 128), scale(2, 1, device="meta"), scale(1, 1)), "on cpu (got (2, 1) torch.float32 on meta)"),
            ((fp8(2, 128), fp8(16, 128), scale(2, 1, dtype=torch.float16), scale(1, 1)), "x_scale must be torch.float32 (got"),
            ((fp8(2, 128), fp8(16, 128), scale(2, 1), scale(1, 1, dtype=E8M0)), "e8m0 scales are not taken here: pass w_scale.float()"),
            ((fp8(2, 128), SHUFFLED, scale(2, 1), scale(1, 1)), "call gemm_a8w8_blockscale_bpreshuffle, or pass unshuffle_weight"),
        ],
    )  # fmt: skip
    def test_operands_that_do_not_fit(self, operands, message):
        """Each error names the op, the operand, the given value and the valid one."""
        with pytest.raises(OperandError, match=f"^a8w8_blockscale: .*{re.escape(message)}"):
            OP.shape_of(*operands)

    def test_the_scale_of_one_block_on_another_device_has_no_other_fault(self):
        """The error ends with what was given: one value is all that one block needs."""
        with pytest.raises(OperandError, match=r"w_scale must be \[1, 1\], torch.float32 on cpu \(got \(1, 1\) torch.float32 on meta\)$"):
            OP.shape_of(fp8(2, 128), fp8(16, 128), scale(2, 1), scale(1, 1, device="meta"))


class TestColumns:
    """From a row of AITER's tables to a shape, and back."""

    def test_a_row_of_aiter(self):
        """M, N and K mean fp8 of the row's gfx and bf16 out."""
        row = {"M": "16", "N": "1536", "K": "7168"}
        for gfx, dtype in (("gfx942", "fp8_e4m3fnuz"), ("gfx950", "fp8_e4m3fn"), ("", "fp8_e4m3fn")):
            shape = OP.columns.parse({**row, "gfx": gfx})
            assert shape == Shape("a8w8_blockscale", 16, 1536, 7168, dtype, "bf16", scale="block")
            assert {name: text for name, text in shape_cells(shape, OP, gfx).items() if text} == row


class TestReference:
    """The exact result that everything is compared with."""

    def test_each_block_has_its_scale(self):
        """Values of one, so the result is the sum of the scales' products over the blocks, times their length."""
        x_scale = torch.tensor([[1.0, 10.0], [2.0, 20.0]])
        w_scale = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        shape = Shape("a8w8_blockscale", 2, 130, 129, "fp8_e4m3fn", "bf16", scale="block")
        out = OP.reference(shape, (fp8(2, 129), fp8(130, 129), x_scale, w_scale))
        assert out[:, 0].tolist() == [128 * 1 * 1 + 10 * 2, 128 * 2 * 1 + 20 * 2]
        assert out[:, 127].tolist() == out[:, 0].tolist()
        assert out[:, 128].tolist() == out[:, 129].tolist() == [128 * 1 * 3 + 10 * 4, 128 * 2 * 3 + 20 * 4]


def test_bytes_moved():
    """Each operand and the output count once, and a scale four bytes."""
    shape = Shape("a8w8_blockscale", 2, 130, 300, "fp8_e4m3fn", "bf16", scale="block")
    assert OP.bytes_moved(shape) == (2 + 130) * 300 + (2 * 3 + 2 * 3) * 4 + 2 * 130 * 2


class TestFunction:
    """AITER's gemm_a8w8_blockscale."""

    def test_aiters_arguments(self):
        """XQ, WQ, x_scale, w_scale and dtype; the output keeps leading dimensions."""
        shape = Shape("a8w8_blockscale", 6, 130, 200, "fp8_e4m3fn", "fp16", scale="block")
        x, weight, x_scale, w_scale = OP.make_inputs(shape, CPU, 0)
        out = TunedGemm().gemm_a8w8_blockscale(x.view(2, 3, 200), weight, x_scale.view(2, 3, 2), w_scale, torch.float16, False)
        assert (out.shape, out.dtype) == ((2, 3, 130), torch.float16)
        assert worst_row_error(out, OP.reference(shape, (x, weight, x_scale, w_scale))) <= OP.tolerance(shape).row_error

    def test_shuffled_weights_have_a_function_of_their_own(self):
        """isBpreshuffled is refused by name."""
        operands = OP.make_inputs(OP.examples[0], CPU, 0)
        with pytest.raises(OperandError, match="isBpreshuffled=True is not taken; call gemm_a8w8_blockscale_bpreshuffle"):
            TunedGemm().gemm_a8w8_blockscale(*operands, isBpreshuffled=True)
