"""e8m0: which order the scales of a call have."""

from __future__ import annotations

import re

import pytest
import torch
from tunedgemm.errors import OperandError
from tunedgemm.ops.e8m0 import E8m0Scale, e8m0_order, shuffled_sizes
from tunedgemm.ops.formats.scales import as_shuffled_scale
from tunedgemm.testing.listed import listed

TYPED = as_shuffled_scale(torch.zeros(256, 8, dtype=torch.uint8))


def order(*scales: torch.Tensor, layout: str = "row", stated: str | None = None, rows: int = 256, groups: int = 8) -> str:
    """Return the order of scales of [rows, groups]."""
    each = [E8m0Scale(f"s{place}", scale, ((rows, groups),), (shuffled_sizes(rows, groups),)) for place, scale in enumerate(scales)]
    return e8m0_order("op", tuple(each), layout, stated)


def test_sizes_are_padded():
    """Shuffled scales have multiples of 256 rows and 8 columns."""
    assert [shuffled_sizes(*sizes) for sizes in ((1, 1), (256, 8), (257, 9), (0, 8))] == [(256, 8), (256, 8), (512, 16), (0, 8)]


@listed("layout", ["row", "aiter16x16"])
def test_the_caller_the_type_or_the_sizes_tell(layout: str):
    """The weight's layout tells nothing where one of these does."""
    plain = torch.zeros(256, 8, dtype=torch.uint8)
    assert order(plain, layout=layout, stated="row") == "row"
    assert order(plain, layout=layout, stated="aiter32x8") == "aiter32x8"
    assert order(TYPED, TYPED, layout=layout) == "aiter32x8"
    assert order(plain, layout=layout, rows=5, groups=3) == "aiter32x8"
    assert order(torch.zeros(5, 3), layout=layout, rows=5, groups=3) == "row"
    assert not order(torch.zeros(7, 7), layout=layout)
    assert not order(torch.zeros(0, 8), layout=layout, rows=0)


def test_sizes_that_fit_both():
    """With a plain weight they are row-major; with a shuffled one the caller must say."""
    plain = torch.zeros(256, 8, dtype=torch.uint8)
    assert order(plain) == "row"
    message = "op: s0: sizes (256, 8) fit row-major and shuffled scales; pass as_shuffled_scale(s0)"
    with pytest.raises(OperandError, match=re.escape(message)):
        order(plain, layout="aiter16x16")


@listed(
    ("scales", "stated", "message"),
    [
        ((TYPED,), "row", "s0 has the order aiter32x8 by its type (got scale_order='row')"),
        ((TYPED,), "m_major", "scale_order must be row or aiter32x8 (got 'm_major')"),
        ((TYPED, torch.zeros(256, 8)), None, "all scales must have one order (got s0 aiter32x8, s1 row); pass shuffle_scale(s)"),
    ],
)
def test_contradictions_are_errors(scales: tuple[torch.Tensor, ...], stated: str | None, message: str):
    """A word against a type, an unknown word, and two orders in one call."""
    with pytest.raises(OperandError, match=f"^op: {re.escape(message)}"):
        order(*scales, stated=stated)
