"""Turns: planted slow-downs are found, and noise is not."""

from __future__ import annotations

import random

import pytest
from tunedgemm.analysis.ab import Result, take_turns


def measured(slow: float, seed: int, *, turns: int = 10, noise: float = 0.005, more: bool = False) -> Result:
    """Run arms with a clock that drifts by 20 %, of which B is slower by a share."""
    chance, runs = random.Random(seed), []

    def run(arm: str) -> float:
        runs.append(arm)
        time = (1 + len(runs) / 150) * chance.gauss(100.0, 100.0 * noise) * (1 + slow * (arm == "b"))
        return 1e6 / time if more else time

    return take_turns(run, turns, more=more, seed=seed)


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize(("slow", "turns", "noise"), [(0.01, 20, 0.003), (0.03, 10, 0.005)])
def test_a_planted_slow_down_is_found(slow, turns, noise, more):
    """Slow-downs of 1 % and 3 % are found in each of 20 runs, of times and of rates."""
    results = [measured(slow, seed, turns=turns, noise=noise, more=more) for seed in range(20)]

    assert [result.verdict for result in results] == ["slower"] * 20
    assert all(result.effect.share == pytest.approx(slow, abs=0.015) for result in results)
    assert all(result.exceeds(slow / 2) for result in results)


def test_a_null_is_reported_as_null():
    """Of 20 runs with equal arms at least 19 resolve nothing; so do 98 % of 400."""
    verdicts = [measured(0.0, seed).verdict for seed in range(400)]

    assert verdicts[:20].count("not resolved") >= 19
    assert verdicts.count("not resolved") >= 392


def test_skewed_times_make_no_arm_faster():
    """Where a fifth of the runs takes longer, 98 % of 200 pairs of equal arms resolve nothing."""

    def verdict(seed: int) -> str:
        chance = random.Random(seed)
        return take_turns(lambda _: chance.gauss(100.0, 0.3) + 10.0 * (chance.random() < 0.2), 51, seed=seed).verdict

    assert [verdict(seed) for seed in range(200)].count("not resolved") >= 196


def test_disturbed_turns_do_not_hide_a_slow_down():
    """Two of 20 runs of an arm take 20 % longer, and 3 % is still found; without it nothing is."""

    def run(slow: float) -> Result:
        chance, runs = random.Random(3), []

        def one(arm: str) -> float:
            runs.append(arm)
            return chance.gauss(100.0, 0.3) * (1 + slow * (arm == "b")) * (1.2 if len(runs) % 29 == 7 else 1.0)

        return take_turns(one, 20)

    assert run(0.03).verdict == "slower" and run(0.03).effect.share == pytest.approx(0.03, abs=0.005)
    assert run(0.0).verdict == "not resolved"


def test_a_gain_never_fails():
    """A faster B is named, and exceeds no threshold."""
    result = measured(-0.03, 1)

    assert result.verdict == "faster" and not result.exceeds(0.0)


def test_what_the_control_differs_by_does_not_count():
    """Where A differs from itself, B must differ by more."""

    def turns(b: float) -> Result:
        return Result(tuple({"a": 100.0, "b": b + 0.1 * (turn % 2), "again": 104.0} for turn in range(10)))

    assert turns(104.0).control.resolved
    assert turns(104.0).verdict == "not resolved"
    assert turns(110.0).verdict == "slower"


def test_the_first_turn_is_not_counted():
    """A cold start of each arm changes nothing, and every arm runs once a turn."""
    runs: list[str] = []

    def run(arm: str) -> float:
        runs.append(arm)
        return 1000.0 if len(runs) <= 3 else 1.0

    kept: list[int] = []
    result = take_turns(run, 7, keep=lambda result: kept.append(len(result.turns)))

    assert result.turns == ({"a": 1.0, "b": 1.0, "again": 1.0},) * 7 and kept == list(range(1, 8))
    assert {arm: runs.count(arm) for arm in runs} == {"a": 8, "b": 8, "again": 8}
    assert len({tuple(runs[turn : turn + 3]) for turn in range(0, 24, 3)}) > 1


def test_few_turns_resolve_nothing():
    """Fewer turns than eight have no interval."""
    result = Result(({"a": 1.0, "b": 2.0, "again": 1.0},) * 7)

    assert result.effect is None and result.verdict == "not resolved" and not result.exceeds(0.0)
