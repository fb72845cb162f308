"""layout: the memory order of a weight, and the errors for other orders."""

import pytest
import torch
import tunedgemm
from tunedgemm.errors import OperandError
from tunedgemm.ops import op_named, ops
from tunedgemm.ops.formats.shuffle import as_shuffled, plain_weight, shuffle_weight
from tunedgemm.ops.layout import layout_of, plain_layout, shuffled_layout
from tunedgemm.shape import Shape
from tunedgemm.testing.listed import listed

WEIGHT = torch.randn(32, 64).bfloat16()


def test_the_type_gives_the_layout():
    """A plain weight is of layout row, a shuffled one of the layout in its type."""
    assert layout_of("a16w16", WEIGHT) == "row"
    assert layout_of("a16w16", shuffle_weight(WEIGHT)) == "aiter16x16"


def test_the_other_kind_is_refused():
    """The message has the given and the valid layout."""
    assert plain_layout("a8w8", WEIGHT, "other") == "row"
    with pytest.raises(OperandError, match=r"a8w8: .*plain .got layout aiter16x16.; call other, or pass unshuffle_weight"):
        plain_layout("a8w8", shuffle_weight(WEIGHT), "other")
    assert shuffled_layout("a8w8", shuffle_weight(WEIGHT, (32, 16)), "(16, 16)", "other") == "aiter32x16"
    with pytest.raises(OperandError, match=r"a8w8: .*shuffled .got a plain tensor.; pass shuffle_weight.weight, .16, 16.*or call other"):
        shuffled_layout("a8w8", WEIGHT, "(16, 16)", "other")


@listed("name", sorted(ops()))
def test_a_weight_shuffled_by_another_library_is_refused(name):
    """A tensor that AITER marked as shuffled is refused;
    multiplied as plain it would give wrong numbers."""
    op = op_named(name)
    shape = next((shape for shape in op.examples if shape.m), Shape(name, 4, 32, 64))
    operands = list(op.make_inputs(shape, torch.device("cpu"), 0))
    operands[1] = plain_weight(operands[1]).view(torch.uint8).clone().view(operands[1].dtype)
    operands[1].is_shuffled = True
    with pytest.raises(OperandError, match="is_shuffled; pass as_shuffled"):
        op.shape_of(*operands, **op.fields(shape))


def test_a_declared_shuffled_weight_runs():
    """The declaration that the error message names is accepted."""
    shuffled = shuffle_weight(WEIGHT)
    theirs = shuffled.plain.clone()
    theirs.is_shuffled = True
    x = torch.randn(3, 64).bfloat16()
    with pytest.raises(OperandError, match="is_shuffled"):
        tunedgemm.gemm_a16w16(x, theirs)
    assert torch.equal(tunedgemm.gemm_a16w16(x, as_shuffled(theirs, (16, 16))), tunedgemm.gemm_a16w16(x, shuffled))
