"""accuracy: the error ratio and the error of the worst row."""

import math

import pytest
import torch
from tunedgemm.ops import accuracy
from tunedgemm.ops.accuracy import error_ratio, worst_row_error
from tunedgemm.ops.op import Tolerance
from tunedgemm.testing.listed import listed

TIGHT = Tolerance(atol=0.1, rtol=0.01, row_error=0.01)


def test_equal_outputs_have_no_error():
    """An output equal to its reference has neither kind of error, in any leading dimensions."""
    ref = torch.randn(6, 5, dtype=torch.float64)
    assert error_ratio(ref.view(2, 3, 5), ref, TIGHT) == 0.0
    assert worst_row_error(ref.view(2, 3, 5), ref) == 0.0


def test_error_ratio_is_the_share_outside_the_bound():
    """The bound is atol + rtol * |reference|, and an element on it is inside."""
    ref = torch.tensor([[0.0, 100.0, 100.0, -100.0]], dtype=torch.float64)
    out = torch.tensor([[0.1, 101.0, 101.2, -98.0]], dtype=torch.float64)
    assert error_ratio(out, ref, TIGHT) == 0.5


def test_worst_row_is_found_among_good_ones():
    """One destroyed row among a thousand has an error ratio that passes and a row error that does
    not.
    """
    ref = torch.randn(1000, 8, dtype=torch.float64)
    out = ref.clone()
    out[700] = 0

    assert error_ratio(out, ref, TIGHT) < 0.05
    assert worst_row_error(out, ref) == pytest.approx(1.0)


@listed("bad", [math.nan, math.inf, -math.inf])
@listed("where", ["out", "ref"])
def test_values_that_are_not_finite_fail_both(bad, where):
    """A NaN or an infinity anywhere, also in the reference, is the worst result."""
    tensors = {"out": torch.ones(4, 4), "ref": torch.ones(4, 4)}
    tensors[where][2, 1] = bad
    assert error_ratio(**tensors, tolerance=Tolerance(math.inf, 1.0, 1.0)) == 1.0
    assert worst_row_error(**tensors) == math.inf


def test_rows_of_zeros():
    """A reference row of zeros asks for zeros."""
    ref = torch.zeros(2, 3)
    assert worst_row_error(torch.zeros(2, 3), ref) == 0.0
    assert worst_row_error(torch.tensor([[0.0, 0.0, 0.0], [0.0, 1e-6, 0.0]]), ref) == math.inf


def test_empty_outputs_are_right():
    """No rows, no error."""
    assert error_ratio(torch.empty(0, 8), torch.empty(0, 8), TIGHT) == 0.0
    assert worst_row_error(torch.empty(0, 8), torch.empty(0, 8)) == 0.0


@listed("out", [torch.ones(3, 4), torch.ones(4, 2), torch.tensor(1.0)], ids=["rows", "columns", "scalar"])
def test_outputs_of_other_sizes_are_wrong(out):
    """An output of another size is wrong, never an exception."""
    assert error_ratio(out, torch.ones(2, 4), TIGHT) == 1.0
    assert worst_row_error(out, torch.ones(2, 4)) == math.inf


def test_narrow_dtypes_are_compared_in_float64():
    """A bf16 output is compared with the exact reference, not with its rounding."""
    ref = torch.tensor([[1.0 + 2.0**-10, 1.0]], dtype=torch.float64)
    assert worst_row_error(ref.to(torch.bfloat16), ref) == pytest.approx(2.0**-10 / 2**0.5, rel=1e-2)


def test_large_outputs_are_compared_in_pieces(monkeypatch):
    """The figures do not depend on how many rows are compared at a time."""
    ref = torch.randn(33, 7, dtype=torch.float64)
    out = ref + torch.randn_like(ref) * 0.1
    whole = error_ratio(out, ref, TIGHT), worst_row_error(out, ref)
    monkeypatch.setattr(accuracy, "_CHUNK", 16)
    assert (error_ratio(out, ref, TIGHT), worst_row_error(out, ref)) == whole
