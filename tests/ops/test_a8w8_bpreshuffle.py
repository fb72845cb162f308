"""a8w8_bpreshuffle: shuffled weights, their layouts and AITER's functions."""

import attrs
import pytest
import torch
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.errors import OperandError
from tunedgemm.ops import op_named
from tunedgemm.ops.accuracy import worst_row_error
from tunedgemm.ops.formats.shuffle import as_shuffled, shuffle_weight
from tunedgemm.shape import Shape
from tunedgemm.testing.listed import listed

OP = op_named("a8w8_bpreshuffle")
PLAIN = op_named("a8w8")
CPU = torch.device("cpu")


def scale(*sizes):
    return torch.ones(*sizes)


class TestShapeOf:
    """From the operands of a call to its shape."""

    @listed(
        ("dtype", "sides", "layout"),
        [(torch.int8, (16, 16), "aiter16x16"), (torch.int8, (32, 16), "aiter32x16"), (torch.float8_e4m3fn, (16, 16), "aiter16x16")],
    )
    def test_the_type_of_the_weight_gives_the_layout(self, dtype, sides, layout):
        """A weight that is shuffled here, or declared to be, gives its layout."""
        x, weight = torch.ones(2, 64).to(dtype), torch.ones(32, 64).to(dtype)
        for given in (shuffle_weight(weight, sides), as_shuffled(weight, sides)):
            shape = OP.shape_of(x, given, scale(2), scale(32))
            assert (shape.layout, shape.n, shape.k) == (layout, 32, 64)

    @listed("dtype", [torch.int8, torch.float8_e4m3fn])
    def test_a_plain_weight_is_refused(self, dtype):
        """The error names both ways to a typed weight and the function for plain ones."""
        sides = r"\(16, 16\)"
        with pytest.raises(
            OperandError, match=rf"pass shuffle_weight\(weight, {sides}\), as_shuffled\(weight, {sides}\) if .* or call gemm_a8w8"
        ):
            OP.shape_of(torch.ones(2, 32).to(dtype), torch.ones(32, 32).to(dtype), scale(2), scale(32))

    def test_a_weight_padded_in_k(self):
        """x is padded by the caller, as the error says."""
        weight = shuffle_weight(torch.ones(32, 64, dtype=torch.int8), (32, 16))
        with pytest.raises(OperandError, match="for a weight padded in K, pad x with zeros to K=64, too"):
            OP.shape_of(torch.ones(2, 50, dtype=torch.int8), weight, scale(2), scale(32))


class TestFunctions:
    """AITER's gemm_a8w8_bpreshuffle and gemm_a8w8_ASM."""

    @listed(("name", "dtype"), [("gemm_a8w8_bpreshuffle", "fp8_e4m3fn"), ("gemm_a8w8_ASM", "int8")])
    def test_aiters_arguments(self, name, dtype):
        """Arguments are taken by place or by name, with or without a bias, in either dtype."""
        shape = Shape("a8w8_bpreshuffle", 6, 32, 64, dtype, "bf16", "bias", "fp32", "row", "aiter16x16")
        operands, call = OP.make_inputs(shape, CPU, 0), getattr(TunedGemm(), name)
        out = call(*operands, torch.bfloat16, True)
        assert worst_row_error(out, OP.reference(shape, operands)) <= OP.tolerance(shape).row_error
        bare = call(*operands[:4], dtype=torch.bfloat16, check=False)
        reference = OP.reference(attrs.evolve(shape, epilogue="none"), operands[:4])
        assert worst_row_error(bare, reference) <= OP.tolerance(shape).row_error
