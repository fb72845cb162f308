"""sum_order: names have all that changes bits, and nothing else."""

import attrs
import pytest
from tunedgemm.backends import split_bias
from tunedgemm.backends.sum_order import PRODUCT, sum_order
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution

BF16, ROW = Shape("a16w16", 8, 64, 4096), Shape("a8w8", 8, 64, 4096, "fp8_e4m3fn", "bf16", scale="row")
INT8, BLOCK = attrs.evolve(ROW, dtype="int8"), attrs.evolve(ROW, op="a8w8_blockscale", scale="block")


@pytest.mark.parametrize(
    ("shape", "fields", "name"),
    [
        (BF16, {}, "wgmma-k16"),
        (BF16, {"part": 1024, "fused": True, "scales": PRODUCT}, "wgmma-k16-s1024"),
        (BF16, {"part": 4096}, "wgmma-k16"),
        (attrs.evolve(BF16, epilogue="bias"), {"fused": True}, "wgmma-k16"),
        (ROW, {"promoted": 128, "part": 2048}, "wgmma-k16-p128-s2048-x-w"),
        (ROW, {"scales": PRODUCT, "fused": True}, "wgmma-k16-xw"),
        (attrs.evolve(ROW, epilogue="bias"), {"fused": True}, "wgmma-k16-x-w-fma"),
        (BLOCK, {"promoted": 128, "fused": True}, "wgmma-k16-p128"),
        (INT8, {"promoted": 128, "part": 1024}, "exact-x-w"),
    ],
)
def test_a_name_has_what_changes_bits(shape, fields, name):
    """One part, fused scales without a bias, and the order of exact sums change nothing."""
    assert sum_order(shape, "wgmma-k16", **fields) == name


def test_a_bias_added_after_the_kernel_is_another_order():
    """The output is rounded before and after; an unknown order stays unknown."""
    kernel = Solution("mine", "k", sum_order="wgmma-k16")
    added = split_bias.with_add(kernel)
    assert (added.sum_order, split_bias.without_add(added).sum_order) == ("wgmma-k16+add", "wgmma-k16")
    assert split_bias.with_add(Solution("mine", "k")).sum_order == ""
