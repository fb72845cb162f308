"""Products of both sides in the place of a16wn's: their operands, and by what they are judged."""

import attrs
import pytest
import torch
from tunedgemm.ops import op_named
from tunedgemm.ops.accuracy import worst_row_error
from tunedgemm.ops.both_sides import PREFIX, PRODUCTS, judged_as, quantiser
from tunedgemm.ops.weight_formats import FORMATS
from tunedgemm.solution import Solution

OP = op_named("a16wn")


def shape_of(w_format, **fields):
    shape = next(each for each in OP.examples if each["w_format"] == w_format and each.m == 5)
    return OP.as_asked(attrs.evolve(shape, **fields))


@pytest.mark.parametrize("w_format", PRODUCTS)
def test_operands_of_the_other_op(w_format):
    """They form the other op's shape, also with leading dimensions, a bias and another output dtype."""
    has_bias = PRODUCTS[w_format] != "a8w8_blockscale"
    shape = shape_of(w_format, outdtype="fp32", **({"epilogue": "bias", "bias_dtype": "fp16"} if has_bias else {}))
    x, *weights = OP.make_inputs(shape, torch.device("cpu"), 0)
    other = op_named(PRODUCTS[w_format])
    given = quantiser(shape)(x.view(1, 5, shape.k), *weights)
    found = other.shape_of(*given, otype=torch.float32)
    assert (found.op, found.m, found.n, found.k, found.bias) == (other.name, 5, shape.n, shape.k, has_bias)
    error = worst_row_error(other.reference(found, given), OP.reference(shape, (x, *weights)))
    assert 1e-3 < error < {"int8_channel": 0.02, "mxfp4": 0.2, "nvfp4": 0.2}.get(w_format, 0.05)


def test_formats_whose_weight_no_other_op_has():
    """Packed integers and formats of one scale a tensor have no product of both sides."""
    assert {name for name in FORMATS if name not in PRODUCTS and not name.startswith(("gptq", "awq", "ct"))} == {"fp8_tensor"}


def test_only_these_solutions_are_judged_by_another_op():
    """A solution of another backend, or of another name, is judged by the op's own reference."""
    names = [Solution("mine", "as_a8w8_mxfp8"), Solution("torch", "a8w8_mxfp8"), Solution("torch", "as_fmoe"), Solution("torch", "")]
    assert all(judged_as(OP, solution) is OP for solution in names)
    shape = shape_of("mxfp8")
    judge = judged_as(OP, Solution("torch", f"{PREFIX}a8w8_mxfp8"))
    operands = OP.make_inputs(shape, torch.device("cpu"), 0)
    given = quantiser(shape)(*operands)
    other = op_named("a8w8_mxfp8")
    assert torch.equal(judge.reference(shape, operands), other.reference(other.shape_of(*given), given))
    assert judge.tolerance(attrs.evolve(shape, outdtype="fp32")) == other.tolerance(attrs.evolve(other.examples[0], outdtype="fp32"))
    assert judge.tolerance(attrs.evolve(shape, outdtype="fp32")) != OP.tolerance(attrs.evolve(shape, outdtype="fp32"))
