"""Timing: a line of the trial log."""

import json
import math

import pytest
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.timing import SCHEMA, STATUSES, Timing

SHAPE, SOLUTION = Shape("a16w16", 1, 2, 3, epilogue="bias"), Solution("mine", "k", 2, batch_invariant=True)


@pytest.mark.parametrize("status", STATUSES)
def test_round_trip(status):
    """Every field of a timing comes back from its line."""
    timing = Timing(SHAPE, SOLUTION, status, 12.5, 0.01, 31, 0.001, 0.002, 1980, "why")
    line = timing.to_json()
    assert "\n" not in line
    assert Timing.from_json(line) == timing
    assert Timing.from_json(line).solution.batch_invariant


def test_status_words_are_closed():
    """An unknown status is an error."""
    with pytest.raises(ValueError, match="status"):
        Timing(SHAPE, SOLUTION, "fine")


@pytest.mark.parametrize(
    ("status", "us", "ok"), [("ok", 1.0, True), ("ok", 0.0, False), ("ok", math.inf, False), ("ok", math.nan, False), ("wrong", 1.0, False)]
)
def test_only_right_and_measured_ones_may_be_selected(status, us, ok):
    """A time of zero, infinity or NaN, or another status, never wins."""
    assert Timing(SHAPE, SOLUTION, status, us).ok is ok


@pytest.mark.parametrize("line", ["", "{", "[]", "{}", json.dumps({"schema": SCHEMA + 1})])
def test_other_lines_are_refused(line):
    """A torn line, or one of another schema, is a ValueError."""
    with pytest.raises(ValueError, match=r"."):
        Timing.from_json(line)


def test_fields_of_later_versions_are_ignored():
    """A line may say more than this version knows."""
    fields = json.loads(Timing(SHAPE, SOLUTION, "ok", 1.0).to_json())
    assert Timing.from_json(json.dumps({**fields, "watts": 700})).us == 1.0
