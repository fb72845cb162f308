"""Estimate: a change with its interval."""

from __future__ import annotations

import random

import pytest
from tunedgemm.analysis.estimate import Estimate, paired, t_quantile


@pytest.mark.parametrize(("freedom", "quantile"), [(4, 4.604), (9, 3.250), (29, 2.756), (1000, 2.581)])
def test_the_quantile_is_students(freedom, quantile):
    """It is that of the printed tables, within 2 %."""
    assert t_quantile(freedom) == pytest.approx(quantile, rel=0.02)


def test_equal_pairs_have_no_change():
    """Ratios without any spread are exact, and 1 means none."""
    assert paired([1.0] * 5) == Estimate(0.0, 0.0) and not paired([1.0] * 5).resolved
    assert paired([1.02] * 5).resolved and paired([1.02] * 5).share == pytest.approx(0.02)
    assert not paired([1.004] * 5, least=0.005).resolved


def test_an_interval_covers_the_truth():
    """Of 400 intervals over ten turns about 1 % miss the true change."""
    chance, missed = random.Random(1), 0
    for _ in range(400):
        found = paired([1.02 * chance.gauss(1.0, 0.01) for _ in range(10)])
        missed += abs(found.share - 0.02) > found.noise

    assert missed <= 12


def test_a_slow_down_within_the_noise_exceeds_nothing():
    """Only a resolved slow-down of at least the threshold counts; a gain never does."""
    assert Estimate(0.03, 0.01).exceeds(0.01)
    assert not Estimate(0.03, 0.04).exceeds(0.01)
    assert not Estimate(0.005, 0.001).exceeds(0.01)
    assert not Estimate(-0.5, 0.01).exceeds(0.01)
    assert str(Estimate(0.03, 0.04)).startswith("not resolved")
