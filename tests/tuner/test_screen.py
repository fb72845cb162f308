"""Screen: most solutions get one round, the best get neighbours, few go on."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.timing import Timing
from tunedgemm.tuner.measure import Effort, median_and_noise, race
from tunedgemm.tuner.screen import MORE_ROUNDS, screen
from tunedgemm.tuner.search import Further
from tunedgemm.tuner.trial import Samples

SHAPE = Shape("a16w16", 16, 1280, 8192)


def solution(name: object, libtype: str = "tri") -> Solution:
    return Solution(libtype, str(name))


class Chip:
    """A sampler over true times that counts rounds and their time, and slows down by *drift* a
    call.
    """

    def __init__(self, times: Mapping[Solution, float], noise: float = 0.0, seed: int = 0, drift: float = 1.0) -> None:
        self.times, self.noise, self.random, self.drift = times, noise, random.Random(seed), drift
        self.rounds: Counter[Solution] = Counter()
        self.asked: list[tuple[Solution, ...]] = []

    def __call__(self, solutions: Sequence[Solution], rounds: int) -> dict[Solution, Samples | Timing]:
        slow = self.drift ** len(self.asked)
        self.asked.append(tuple(solutions))
        self.rounds.update(dict.fromkeys(solutions, rounds))
        return {s: self._samples(self.times[s] * slow, rounds) if self.times[s] else Timing(SHAPE, s, "crashed") for s in solutions}

    def _samples(self, us: float, rounds: int) -> Samples:
        return Samples(tuple(us * (1 + abs(self.random.gauss(0, self.noise))) for _ in range(rounds)), calls=10)

    def spent(self) -> float:
        """Microseconds of all calls so far, were they at their true times."""
        return sum(self.times[s] * rounds for s, rounds in self.rounds.items())


def none(_: Sequence[Solution]) -> list[Solution]:
    return []


def test_slow_solutions_get_one_round() -> None:
    """A solution far slower than the best of its backend is timed once.

    A slow backend's best is timed on.
    """
    times = {solution(1): 10.0, solution(2): 10.3, solution(3): 30.0, solution(4, "slow"): 25.0, solution(5, "slow"): 60.0}
    chip = Chip(times)
    found = screen(SHAPE, list(times), chip, 20, Further(none), 0.0)

    assert [chip.rounds[s] for s in times] == [1 + MORE_ROUNDS, 1 + MORE_ROUNDS, 1, 1 + MORE_ROUNDS, 1]
    assert found.rough == times


def test_survivors_are_near_the_best_and_first_guesses() -> None:
    """Solutions that are 30 % slower are dropped, except each backend's first guess.

    The rest have the status screened.
    """
    times = {
        solution(1): 13.0,
        solution(2): 10.0,
        solution(3): 13.1,
        solution(4, "slow"): 25.0,
        solution(5, "slow"): 24.0,
        solution(6): 10.4,
    }
    found = screen(SHAPE, list(times), Chip(times), 20, Further(none), 0.0)

    assert found.survivors == (solution(2), solution(6), solution(1), solution(4, "slow"))
    assert {(timing.solution, timing.status, timing.us) for timing in found.dropped} == {
        (solution(3), "screened", 13.1),
        (solution(5, "slow"), "screened", 24.0),
    }


def test_at_most_topk_of_a_libtype_are_kept() -> None:
    """The fastest of each backend survive, and its first guess."""
    times = {solution(place, libtype): 10.0 + (30 - place) / 1000 for libtype in ("tri", "other") for place in range(30)}
    found = screen(SHAPE, list(times), Chip(times), 4, Further(none), 0.0)

    for libtype in ("tri", "other"):
        kept = {s for s in found.survivors if s.libtype == libtype}
        assert kept == {solution(0, libtype), *(solution(place, libtype) for place in (26, 27, 28, 29))}


def test_noise_widens_the_band() -> None:
    """Where a solution's own rounds differ by several percent, one that seems 8 % slower may be the
    best.
    """
    times = {solution(1): 10.0, solution(2): 10.0, solution(3): 10.8}
    quiet = screen(SHAPE, list(times), Chip(times, 0.001), 20, Further(none), 0.0)
    noisy = screen(SHAPE, list(times), Chip(times, 0.05), 20, Further(none), 0.0)

    assert solution(3) not in quiet.survivors
    assert solution(3) in noisy.survivors


def test_failures_are_reported_and_dropped() -> None:
    """A solution that crashes while it is timed is returned as its Timing.

    If all crash, none survives.
    """
    times = {solution(1): 0.0, solution(2): 10.0}
    found = screen(SHAPE, list(times), Chip(times), 20, Further(none), 0.0)

    assert found.survivors == (solution(2),)
    assert found.dropped == (Timing(SHAPE, solution(1), "crashed"),)
    assert screen(SHAPE, [solution(1)], Chip(times), 20, Further(none), 0.0).survivors == ()
    assert screen(SHAPE, [], Chip({}), 20, Further(none), 0.0).survivors == ()


class Hill:
    """Solutions named by a whole number; the nearer to 50, the faster.

    Neighbours are one step away.
    """

    def __init__(self, step: float) -> None:
        self.times = {solution(place): 10.0 * (1 + step * abs(50 - place)) for place in range(100)}
        self.asked: list[tuple[Solution, ...]] = []

    def neighbours(self, leaders: Sequence[Solution]) -> list[Solution]:
        self.asked.append(tuple(leaders))
        return [solution(int(leader.kernel_name) + step) for leader in leaders for step in (-1, 1)]


def test_refinement_climbs_while_it_gains() -> None:
    """Neighbours of the best are tried, then theirs; no solution is queried or timed twice."""
    hill = Hill(0.02)
    found = screen(SHAPE, [solution(place) for place in (10, 47, 90)], Chip(hill.times), 20, Further(hill.neighbours), 0.0)

    assert found.survivors[0] == solution(50)
    assert len(hill.asked) == 3
    asked = [leader for leaders in hill.asked for leader in leaders]
    assert len(asked) == len(set(asked))


def test_refinement_ends_where_it_gains_less_than_a_percent() -> None:
    """A flat top is not searched: each pass compiles kernels."""
    hill = Hill(0.003)
    screen(SHAPE, [solution(47)], Chip(hill.times), 20, Further(hill.neighbours), 0.0)

    assert len(hill.asked) == 1


@pytest.mark.parametrize("floor, passes", [(9.9, 0), (8.0, 1)])
def test_shapes_at_the_roofline_are_not_refined(floor: float, passes: int) -> None:
    """Where the hardware allows no more, neighbours are not even compiled."""
    hill = Hill(0.05)
    screen(SHAPE, [solution(50)], Chip(hill.times), 20, Further(hill.neighbours), floor)

    assert len(hill.asked) == passes


@pytest.mark.parametrize(("us", "is_refined"), [(10.9, True), (11.1, False), (20.0, False)])
def test_a_backend_far_behind_is_not_refined(us: float, is_refined: bool) -> None:
    """Only libtypes that may still win are refined: those within a tenth of the fastest."""
    asked: list[Solution] = []
    times = {solution(1): 10.0, solution(2, "slow"): us}
    screen(SHAPE, list(times), Chip(times), 20, Further(lambda leaders: asked.extend(leaders) or []), 0.0)

    assert set(asked) == {solution(1), *[solution(2, "slow")] * is_refined}


@pytest.mark.parametrize(("gain", "passes"), [(0.02, 1), (0.06, 3)])
def test_later_passes_refine_only_backends_that_came_near(gain: float, passes: int) -> None:
    """The neighbours of a libtype's neighbours are tried if those came within 5 % of the fastest."""
    asked: list[Solution] = []
    times = {solution(1): 10.0, **{solution(place, "slow"): 10.8 * (1 - gain) ** (place - 2) for place in range(2, 9)}}

    def neighbours(leaders: Sequence[Solution]) -> list[Solution]:
        asked.extend(leader for leader in leaders if leader.libtype == "slow")
        return [solution(int(leader.kernel_name) + 1, "slow") for leader in leaders if leader.libtype == "slow"]

    screen(SHAPE, [solution(1), solution(2, "slow")], Chip(times), 20, Further(neighbours), 0.0)

    assert asked == [solution(place, "slow") for place in range(2, 2 + passes)]


def test_a_clock_that_fell_while_neighbours_compiled_does_not_hide_them() -> None:
    """Neighbours are timed with the best so far.

    3 % faster shows although everything is 10 % slower a call later.
    """
    hill = Hill(0.03)
    found = screen(SHAPE, [solution(49)], Chip(hill.times, drift=1.1), 20, Further(hill.neighbours), 0.0)

    assert found.survivors[0] == solution(50)
    assert found.rough[solution(50)] / found.rough[solution(49)] == pytest.approx(1 / 1.03)


def test_a_chip_that_heats_while_it_is_screened_hides_no_solution() -> None:
    """The clock falls by 2 % with each of 20 samples, and the fastest solutions are timed last."""

    class Heating(Chip):
        """A chip whose clock falls with every sample."""

        samples = 0

        def _samples(self, us: float, rounds: int) -> Samples:
            self.samples += 1
            return super()._samples(us * 1.02 ** min(self.samples, 20), rounds)

    times = {solution(place): 12.0 - 0.03 * place for place in range(64)}
    found = screen(SHAPE, list(times), Heating(times), 8, Further(none), 0.0)

    assert set(found.survivors) >= {solution(place) for place in range(60, 64)}


def test_an_anchor_that_fails_is_replaced() -> None:
    """The solution by which clocks are compared crashes; the others are timed and one survives."""

    class Crashing(Chip):
        """A chip on which solution 0 crashes at its second sample."""

        def __call__(self, solutions: Sequence[Solution], rounds: int) -> dict[Solution, Samples | Timing]:
            answers = super().__call__(solutions, rounds)
            if len(self.asked) > 1 and solution(0) in answers:
                answers[solution(0)] = Timing(SHAPE, solution(0), "crashed")
            return answers

    times = {solution(place): 12.0 - 0.1 * place for place in range(20)}
    found = screen(SHAPE, list(times), Crashing(times), 8, Further(none), 0.0)

    assert found.survivors[0] == solution(19)
    assert Timing(SHAPE, solution(0), "crashed") in found.dropped


def test_the_search_takes_a_tenth_of_timing_everything() -> None:
    """Over random fields of 120 solutions.

    At least 10 times less than 106 rounds of each, the winner within 1 %.
    """
    exhaustive, spent, near = 0.0, 0.0, 0
    for seed in range(40):
        draw = random.Random(seed)
        times = {solution(place, "tri" if place % 3 else "other"): 10.0 * (1 + draw.expovariate(1.5)) for place in range(120)}
        chip = Chip(times, 0.004, seed)
        found = screen(SHAPE, list(times), chip, 20, Further(none), 0.0)
        answers = race(SHAPE, found.survivors, chip, Effort(5, 101, 4.0), None)
        us = {s: median_and_noise(answer.us)[0] for s, answer in answers.items() if isinstance(answer, Samples)}
        near += times[min(us, key=us.__getitem__)] <= 1.01 * min(times.values())
        exhaustive, spent = exhaustive + 106 * sum(times.values()), spent + chip.spent()

    assert exhaustive >= 10 * spent
    assert near >= 38
