"""Measure: a race in interleaved rounds, decided by ratios within them."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence

import pytest
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.timing import Timing
from tunedgemm.tuner.measure import CLOSE, COMPARISON_ROUNDS, STEADY_S, TURNS, Effort, median_and_noise, paired_comparison, race, steady
from tunedgemm.tuner.select import TIE, select
from tunedgemm.tuner.trial import Samples

SHAPE = Shape("a16w16", 4096, 7168, 8192)
EFFORT = Effort(warmup=5, iters=101, seconds=1e9)
A, B, C, D = (Solution("fake", name) for name in "abcd")


class Chip:
    """A device with noisy samples, whose clock depends on the number of samples so far.

    Args:
        times: true microseconds of each solution at the first clock.
        drift: samples so far to the factor by which everything is slower.
        noise: standard deviation of a sample; one in fifty is also an outlier.
        fails: solution to the number of samples after which it fails.
    """

    def __init__(
        self,
        times: Mapping[Solution, float],
        drift: Callable[[int], float] = lambda _: 1.0,
        noise: float = 0.0,
        seed: int = 0,
        fails: Mapping[Solution, int] | None = None,
    ) -> None:
        self.times, self.drift, self.noise, self.fails = times, drift, noise, fails or {}
        self.random, self.samples = random.Random(seed), 0
        self.asked: list[tuple[tuple[Solution, ...], int]] = []

    def __call__(self, solutions: Sequence[Solution], rounds: int) -> dict[Solution, Samples | Timing]:
        self.asked.append((tuple(solutions), rounds))
        us: dict[Solution, list[float]] = {solution: [] for solution in solutions}
        for _ in range(rounds):
            for solution in self.random.sample(list(solutions), len(solutions)):
                us[solution].append(self.one(solution))
        failed = {s: Timing(SHAPE, s, "crashed") for s in solutions if self.count(s) > self.fails.get(s, 1 << 30)}
        return {**{solution: Samples(tuple(times), calls=10, clock_mhz=1500) for solution, times in us.items()}, **failed}

    def one(self, solution: Solution) -> float:
        self.samples += 1
        outlier = 1.3 if self.noise and self.random.random() < 0.02 else 1.0
        return self.times[solution] * self.drift(self.samples) * math.exp(self.random.gauss(0, self.noise)) * outlier

    def count(self, solution: Solution) -> int:
        """Samples of one solution so far."""
        return sum(rounds for solutions, rounds in self.asked if solution in solutions)


def warming(samples: int) -> float:
    """The behaviour of an H200 under load: 10 % slower in the end."""
    return 1 + 0.1 * (1 - math.exp(-samples / 150))


def timings(answers: Mapping[Solution, Samples | Timing]) -> dict[Solution, Timing]:
    found = {}
    for solution, answer in answers.items():
        if isinstance(answer, Timing):
            found[solution] = answer
        else:
            median, noise = median_and_noise(answer.us)
            found[solution] = Timing(SHAPE, solution, "ok", us=median, noise=noise, samples=len(answer.us))
    return found


def winner(answers: Mapping[Solution, Samples | Timing], incumbent: Solution | None = None) -> tuple[Solution, int]:
    chosen, tied = select(tuple(timings(answers).values()), incumbent, {"fake": 0}, ["fake"])
    assert chosen is not None
    return chosen.solution, tied


def test_the_median_and_its_noise() -> None:
    """Outliers move neither.

    The noise is the half width of the median's interval, relative to it.
    """
    median, noise = median_and_noise(tuple([10.0] * 50 + [10.2] * 50 + [500.0]))

    assert median == pytest.approx(10.2)
    assert 0 < noise < 0.02
    assert median_and_noise((7.0,)) == (7.0, 0.0)


@pytest.mark.parametrize("seed", range(20))
def test_a_drifting_clock_misleads_sequential_timing_and_not_the_race(seed: int) -> None:
    """On a warming chip, sequential timing picks the solution that ran first.

    The race picks the fastest, by its true lead.
    """
    times = {A: 103.0, B: 106.0, C: 100.0}
    one_by_one = Chip(times, warming, 0.004, seed)
    sequential = {solution: one_by_one([solution], 101)[solution] for solution in times}
    raced = race(SHAPE, list(times), Chip(times, warming, 0.004, seed), EFFORT, None)

    assert winner(sequential)[0] == A
    assert winner(raced)[0] == C
    assert timings(raced)[A].us / timings(raced)[C].us == pytest.approx(1.03, abs=0.015)


def test_a_dropout_timed_on_a_cool_chip_does_not_win() -> None:
    """Times of the first rounds are given as the last rounds would have had them."""
    times = {A: 104.0, B: 100.0, C: 100.4}
    answers = race(SHAPE, list(times), Chip(times, warming, 0.002, 3), Effort(0, 101, 1e9), None)
    us = {solution: timing.us for solution, timing in timings(answers).items()}

    assert len(answers[A].us) < len(answers[B].us)
    assert us[A] / us[B] == pytest.approx(1.04, abs=0.012)


@pytest.mark.parametrize("drift", [warming, lambda samples: 1 + 0.05 * math.sin(samples / 40)], ids=["warming", "breathing"])
@pytest.mark.parametrize("noise", [0.002, 0.01, 0.02])
def test_two_copies_of_one_kernel_tie(noise: float, drift: Callable[[int], float]) -> None:
    """A/A: in at least 95 of 100 trials neither copy beats the other, with or without a
    third.
    """
    trials = [
        race(SHAPE, list(times), Chip(times, drift, noise, seed), EFFORT, None)
        for seed in range(100)
        for times in ({A: 50.0, B: 50.0}, {A: 50.0, B: 50.0, C: 55.0})
    ]
    ties = sum(all(winner(trial, incumbent)[0] == incumbent for incumbent in (A, B)) for trial in trials)

    assert len(trials) == 200
    assert ties >= 0.95 * len(trials)


@pytest.mark.parametrize("noise", [0.002, 0.01])
def test_three_percent_is_not_a_tie(noise: float) -> None:
    """The margin that lets copies tie does not hide a real gain over the table's row."""
    found = [winner(race(SHAPE, [A, B], Chip({A: 51.5, B: 50.0}, warming, noise, seed), EFFORT, None), A) for seed in range(100)]

    assert sum(solution == B for solution, _ in found) >= 95


def test_a_race_drops_clearly_slower_solutions() -> None:
    """Clearly slower solutions get few rounds; the one that is spared gets as many as the best."""
    times = {A: 100.0, B: 130.0, C: 140.0, D: 100.3}
    chip = Chip(times, warming, 0.004)
    answers = race(SHAPE, list(times), chip, EFFORT, C)

    assert len(answers[B].us) <= 8
    assert len(answers[C].us) == len(answers[A].us) == len(answers[D].us) >= 16
    assert answers[A].calls == 10 and answers[A].clock_mhz == 1500


def test_an_ineligible_solution_drops_no_other() -> None:
    """If an ineligible baseline is twice as fast, the others race to their end."""
    chip = Chip({A: 5.0, B: 10.0, C: 10.1}, noise=0.03)
    answers = timings(race(SHAPE, [A, B, C], chip, EFFORT, A, A))

    assert answers[B].samples == answers[A].samples > 50
    assert timings(race(SHAPE, [A, B, C], chip, EFFORT, A))[B].samples < 10


def test_a_race_of_ties_ends_early() -> None:
    """If all are equal and noise is low, further rounds would decide nothing."""
    chip = Chip({A: 100.0, B: 100.0, C: 100.1}, warming, 0.0005)
    answers = race(SHAPE, [A, B, C], chip, EFFORT, None)

    assert {len(answer.us) for answer in answers.values()} == {16}
    assert CLOSE == TIE


def test_an_undecided_race_runs_to_iters() -> None:
    """If noise hides the order, all allowed rounds run, without those of the warm-up."""
    chip = Chip({A: 100.0, B: 100.8}, noise=0.05)
    answers = race(SHAPE, [A, B], chip, Effort(warmup=5, iters=37, seconds=1e9), None)

    assert len(answers[A].us) == len(answers[B].us) == 37
    assert chip.count(A) == 42


def test_a_race_ends_when_its_seconds_are_spent() -> None:
    """Rounds cost what their calls take on the device; only the first block may go beyond."""
    times = {A: 1e5, B: 1.007e5}  # 10 calls: 2 s a round
    answers = race(SHAPE, [A, B], Chip(times, noise=0.05), Effort(warmup=1, iters=101, seconds=30.0), None)
    least = race(SHAPE, [A, B], Chip(times, noise=0.05), Effort(warmup=1, iters=101, seconds=0.0), None)

    assert 10 <= len(answers[A].us) <= 14
    assert len(least[A].us) == 4


def test_a_race_ends_at_its_deadline() -> None:
    """After the deadline no block begins but the first."""
    chip = Chip({A: 100.0, B: 100.7}, noise=0.05)

    assert len(race(SHAPE, [A, B], chip, Effort(0, 101, 1e9, time.monotonic() - 1), None)[A].us) == 4


def test_a_failing_finalist_leaves_the_race_running() -> None:
    """A solution that crashes in the warm-up or later is returned as a failed Timing."""
    chip = Chip({A: 100.0, B: 99.0, C: 101.0}, noise=0.02, fails={A: 3, B: 10})
    answers = race(SHAPE, [A, B, C], chip, EFFORT, None)

    assert answers[A] == Timing(SHAPE, A, "crashed")
    assert answers[B] == Timing(SHAPE, B, "crashed")
    assert len(answers[C].us) >= 16
    assert race(SHAPE, [], chip, EFFORT, None) == {}


def test_solutions_dropped_for_a_failed_leader_race_again() -> None:
    """Where the fastest fails late, the winner is the fastest of the others, timed as thoroughly as
    any winner.
    """
    times = {A: 50.0, B: 104.0, C: 100.0}
    chip = Chip(times, warming, 0.01, fails={A: 14})
    answers = race(SHAPE, [A, B, C], chip, EFFORT, None)

    assert answers[A] == Timing(SHAPE, A, "crashed")
    assert winner(answers)[0] == C
    assert len(answers[C].us) >= 16


def test_a_paired_comparison_times_two_solutions_alone() -> None:
    """Both stay to the end, of 51 rounds at most."""
    chip = Chip({A: 100.0, B: 100.6}, warming, 0.02)
    answers = paired_comparison([A, B], chip, EFFORT)

    assert {solutions for solutions, _ in chip.asked} == {(A, B)}
    assert len(answers[A].us) == len(answers[B].us) == COMPARISON_ROUNDS
    assert len(paired_comparison([A, B], Chip({A: 100.0, B: 150.0}), EFFORT)[B].us) == 16


class Capped(Chip):
    """A chip at its power cap: its clock follows, slowly, what the calls of late have spent.

    Args:
        times: microseconds of each solution at one clock.
        watts: what each spends at that clock, the cap being 1.
    """

    def __init__(self, times: Mapping[Solution, float], watts: Mapping[Solution, float]) -> None:
        super().__init__(times)
        self.watts, self.clock = watts, 1.0

    def one(self, solution: Solution) -> float:
        us = self.times[solution] / self.clock
        share = 1 - math.exp(-us * 10 / 1e5)  # of a sample in a tenth of a second
        self.clock += share * (1 / self.watts[solution] - self.clock)
        return us


def test_at_the_power_cap_each_solution_runs_alone() -> None:
    """A solution that is faster at equal clocks but uses more power seems faster in rounds, and is
    slower alone.
    """
    chip = Capped({A: 1000.0, B: 1050.0}, {A: 1.3, B: 1.2})
    mixed = paired_comparison([A, B], chip, EFFORT)
    assert all(isinstance(answer, Samples) for answer in mixed.values())
    known = {solution: answer for solution, answer in mixed.items() if isinstance(answer, Samples)}
    chip.asked.clear()
    alone = steady(known, chip)

    assert median_and_noise(known[B].us)[0] / median_and_noise(known[A].us)[0] == pytest.approx(1.05, rel=0.01)
    times = {solution: median_and_noise(answer.us)[0] for solution, answer in alone.items() if isinstance(answer, Samples)}
    assert times[B] / times[A] == pytest.approx(1050 * 1.2 / 1300, rel=0.01)
    assert [solutions for solutions, _ in chip.asked] == [(A,), (B,), (B,), (A,), (A,), (B,)]
    assert all(rounds * 10 * min(times.values()) >= STEADY_S * 1e6 * 0.9 for _, rounds in chip.asked)
    chip.asked.clear()
    steady(known, chip, turns=1)
    assert [solutions for solutions, _ in chip.asked] == [(A,), (B,)]


def test_a_solution_that_fails_alone_is_not_timed_again() -> None:
    """Its answer is how it failed; the other has all its turns."""
    chip = Chip({A: 1000.0, B: 1000.0}, fails={A: 60})
    known = {solution: Samples((1000.0,), calls=10) for solution in (A, B)}
    answers = steady(known, chip)

    assert answers[A] == Timing(SHAPE, A, "crashed")
    assert (chip.count(A), chip.count(B)) == (2 * 40, TURNS * 40)
