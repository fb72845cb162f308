"""Verdict: which rows replace which."""

from __future__ import annotations

import pytest
from tunedgemm.compare import Change, Served, decide
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution

SHAPE = Shape("a16w16", 1, 64, 128, "fp32")
OK, SLOW = Served(SHAPE, Solution("turbo", "a"), us=10.0), Served(SHAPE, Solution("turbo", "b"), us=12.0)
WRONG = Served(SHAPE, Solution("turbo", "c"), "mismatch:err_ratio=0.5000")


@pytest.mark.parametrize(
    ("before", "after", "ratio", "noise", "decision", "reason"),
    [
        (SLOW, OK, 0.90, 0.02, "threshold_met", "10.0 %"),
        (SLOW, OK, 0.97, 0.01, "threshold_met", "3.0 %"),
        (SLOW, OK, 0.98, 0.01, "skip", "less than 3 %"),
        (SLOW, OK, 0.90, 0.11, "skip", "a tie"),
        (OK, SLOW, 1.05, 0.11, "skip", "a tie"),
        (OK, SLOW, 1.20, 0.01, "skip", "slower"),
        (OK, OK, 0.0, 0.0, "skip", "same solution"),
        (WRONG, OK, 0.0, 0.0, "no_baseline", "mismatch:err_ratio=0.5000"),
        (OK, WRONG, 0.0, 0.0, "skip", "not right with the new row"),
        (WRONG, WRONG, 0.0, 0.0, "skip", "not right with the new row"),
    ],
)
def test_the_rule_by_which_a_row_is_replaced(before, after, ratio, noise, decision, reason):
    """AITER's threshold and its three words; what lies within the noise is a tie whatever the threshold."""
    decided = decide(Change(before, after, ratio, noise), 3.0 - 1e-9)

    assert decided.decision == decision
    assert reason in decided.reason
