"""Verdict: which rows replace which."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from tunedgemm.analysis.compare import Change, Compared, Served, decide, print_compared
from tunedgemm.device import Device
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution

SHAPE = Shape("a16w16", 1, 64, 128, "fp32")
OK, SLOW = Served(SHAPE, Solution("turbo", "a"), us=10.0), Served(SHAPE, Solution("turbo", "b"), us=12.0)
WRONG = Served(SHAPE, Solution("turbo", "c"), "mismatch:err_ratio=0.5000")


def test_shapes_without_a_device_are_failures():
    """A comparison that lost its devices fails and lists the remaining shapes; no width breaks its lines."""
    shape = Shape("a16w16", 1, 64, 128)
    change = Change(Served(shape, us=2.0), Served(shape, us=1.0), ratio=0.5, reason="why so")
    device = Device("sm_90", 132)
    compared = Compared(device, Path("t.csv"), Path("c.csv"), Path("r.txt"), (change,), lost=(shape,))

    assert list(compared.failed) == [shape]
    for width in (60, 160):
        output = Console(file=io.StringIO(), width=width)
        print_compared(compared, output)
        text = output.file.getvalue()
        assert "1 not compared (without a working device" in text and "  why so" in text
        [line, _] = (line for line in text.splitlines() if line.startswith("(1, 64, 128, bf16)"))
        assert [cell.strip() for cell in line.split("|")][1:] == ["2.00", "1.00", "2.00x", "OK"]
        assert all(len(line) <= width for line in text.splitlines() if line[:1] in "┏┃┡│└")


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
    """The verdict follows AITER's threshold and three words;
    a ratio within the noise is always a tie."""
    decided = decide(Change(before, after, ratio, noise), 3.0 - 1e-9)

    assert decided.decision == decision
    assert reason in decided.reason
