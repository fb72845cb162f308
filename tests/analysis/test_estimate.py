"""Estimate: a change with its interval."""

from __future__ import annotations

import random

import pytest
from tunedgemm.analysis.estimate import Estimate, _rank, paired


@pytest.mark.parametrize(("count", "rank"), [(8, 0), (9, 1), (10, 3), (15, 15), (20, 37), (60, 567)])
def test_the_rank_is_wilcoxons(count, rank):
    """It is the critical value of the printed tables, two-sided 1 %; the normal one differs little."""
    assert _rank(count) == rank
    assert abs(_rank(61) - 591) < 12


def test_equal_pairs_have_no_change():
    """Ratios without any spread are exact, and 1 means none."""
    assert paired([1.0] * 8) == Estimate(0.0, 0.0, 0.0) and not paired([1.0] * 8).resolved
    assert paired([1.02] * 8).resolved and paired([1.02] * 8).share == pytest.approx(0.02)
    assert not paired([1.004] * 8, least=0.005).resolved


def test_an_interval_covers_the_truth():
    """Of 400 intervals over ten turns about 1 % miss the true change."""
    chance, missed = random.Random(1), 0
    for _ in range(400):
        found = paired([1.02 * chance.gauss(1.0, 0.01) for _ in range(10)])
        missed += not found.low <= 0.02 <= found.high

    assert missed <= 12


def test_a_slow_down_within_the_noise_exceeds_nothing():
    """Only a resolved slow-down of at least the threshold counts; a gain never does."""
    assert Estimate.around(0.03, 0.01).exceeds(0.01)
    assert not Estimate.around(0.03, 0.04).exceeds(0.01)
    assert not Estimate.around(0.005, 0.001).exceeds(0.01)
    assert not Estimate.around(-0.5, 0.01).exceeds(0.01)
    assert str(Estimate.around(0.03, 0.04)).startswith("not resolved")
