"""Stage 5, measure: time finalists in interleaved rounds until slower ones drop out or tie.

Clocks and temperatures drift by more than kernels differ. So solutions are compared by the ratios
of their samples within rounds, and the common drift is removed from the returned times.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence

import attrs

from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.timing import Timing
from tunedgemm.tuner.trial import Sample, Samples

_log = logging.getLogger("tunedgemm")

#: Rounds between evaluations, fewer at first, because most finalists are clearly slower.
BLOCK, FIRST_BLOCKS = 8, 4
#: Relative differences below this count as equal, as in the selection of the winner.
CLOSE = 0.005
#: Before a full block of rounds, intervals are unreliable: only finalists slower by this drop out.
FAR = 0.03
#: Most rounds of a paired comparison.
COMPARISON_ROUNDS = 51
#: Seconds per turn of one solution alone, and turns. On an H200 at its power cap, one kernel was
#: 1.07x torch in rounds and in turns of 0.1 s, but 1.03x in turns of 0.4 s.
STEADY_S, TURNS = 0.4, 3
#: Fewest rounds before ties may end a race.
FEWEST_ROUNDS = 16
#: Half widths of confidence intervals in standard deviations: of the reported median, and of
#: repeated evaluations.
REPORTED, REPEATED = 1.96, 3.0
#: Rounds on each side over which drift is smoothed; short compared with clock changes.
REACH = 4


@attrs.frozen
class Effort:
    """Limits of one race.

    Attributes:
        warmup: uncounted rounds.
        iters: most counted rounds.
        seconds: most device seconds, including warm-up; the first block of rounds always runs.
        deadline: `time.monotonic` after which no block but the first starts.
    """

    warmup: int
    iters: int
    seconds: float
    deadline: float = math.inf


def median_and_noise(samples: Sequence[float]) -> tuple[float, float]:
    """Return the median and the relative half width of its 95 % confidence interval."""
    median, low, high = _interval(samples, REPORTED)
    return median, (high - low) / 2 / median if median else 0.0


def race(
    shape: Shape,
    finalists: Sequence[Solution],
    sample: Sample,
    effort: Effort,
    spared: Solution | None,
    ineligible: Solution | None = None,
) -> dict[Solution, Samples | Timing]:
    """Time finalists in interleaved rounds until the fastest are known or the effort is spent.

    Args:
        shape: the shape, for the log.
        finalists: the solutions to time.
        sample: takes the samples.
        effort: limits of the race.
        spared: a finalist that never drops out.
        ineligible: a finalist that cannot win, so that no other drops out because of it.

        Returns:
        The samples of each solution by round, without drift, fewer if it dropped out; or the Timing
        of its failure.
    """
    lost: dict[Solution, Samples | Timing] = {}
    left = list(dict.fromkeys(finalists))
    while True:
        run = _Race(sample, effort, frozenset({spared} if spared else ()), left, ineligible)
        run.run(effort.iters)
        _log.debug("%s: %d finalists, %d to the end, %.2f s of the device", shape, len(left), len(run.racing), run.seconds)
        if not run.upset:
            return {**lost, **run.answers()}
        # The failed solution may have made others drop out, so the rest race again.
        lost |= {solution: timing for solution, timing in run.answers().items() if isinstance(timing, Timing)}
        left = [solution for solution in left if solution not in lost]
        effort = attrs.evolve(effort, warmup=0, seconds=effort.seconds - run.seconds)


def paired_comparison(few: Sequence[Solution], sample: Sample, effort: Effort) -> dict[Solution, Samples | Timing]:
    """Compare a few solutions without dropouts; among many, the chip would run hotter."""
    run = _Race(sample, effort, frozenset(few), list(dict.fromkeys(few)))
    run.run(min(effort.iters, COMPARISON_ROUNDS))
    return run.answers()


def steady(few: Mapping[Solution, Samples], sample: Sample, turns: int = TURNS) -> dict[Solution, Samples | Timing]:
    """Time a few solutions each alone, long enough for the clock to settle.

    At the power cap, a call's time follows from its energy. Interleaved rounds share one clock, so
    a solution that uses more power seems faster there than in a model.

    Args:
        few: the solutions with their earlier samples.
        sample: takes the samples.
        turns: turns of each solution, of `STEADY_S`.

    Returns:
        The samples of the second half of each turn, or the Timing of its failure.
    """
    answers: dict[Solution, Samples | Timing] = {}
    rounds = max(2, math.ceil(STEADY_S * 1e6 / min(_median(samples.us) * samples.calls for samples in few.values())))
    for turn in range(turns):
        for solution in list(few)[:: -1 if turn % 2 else 1]:
            earlier = answers.get(solution)
            if isinstance(earlier, Timing):
                continue
            answer = sample((solution,), rounds)[solution]
            if isinstance(answer, Samples):
                answer = attrs.evolve(answer, us=(earlier.us if earlier else ()) + answer.us[len(answer.us) // 2 :])
            answers[solution] = answer
    return answers


@attrs.define(eq=False)
class _Race:
    """State of a race: racing solutions have a sample per round, dropouts only of the first ones."""

    sample: Sample
    effort: Effort
    spared: frozenset[Solution]
    racing: list[Solution]
    ineligible: Solution | None = None
    seconds: float = 0.0
    upset: bool = False
    _times: dict[Solution, list[float]] = attrs.field(factory=dict)
    _last: dict[Solution, Samples] = attrs.field(factory=dict)
    _failed: dict[Solution, Timing] = attrs.field(factory=dict)

    def run(self, rounds: int) -> None:
        """Run at most *rounds*; stop early if a solution fails after others dropped out."""
        if self.effort.warmup:
            self._block(self.effort.warmup, counted=False)
        done = 0
        while self.racing and done < rounds:
            block = min(BLOCK if done >= BLOCK else FIRST_BLOCKS, rounds - done)
            if done:
                block = min(block, self._affordable())
                if block < 1 or time.monotonic() >= self.effort.deadline:
                    break
            self._block(block, counted=True)
            done += block
            if self.upset or (self.racing and self._decided(done)):
                break

    def answers(self) -> dict[Solution, Samples | Timing]:
        """Return the samples or the failure of each solution."""
        drift = self._drift()
        answers: dict[Solution, Samples | Timing] = dict(self._failed)
        for solution, times in self._times.items():
            if solution not in self._failed:
                us = tuple(us / factor for us, factor in zip(times, drift, strict=False))
                answers[solution] = attrs.evolve(self._last[solution], us=us)
        return answers

    def _block(self, rounds: int, counted: bool) -> None:
        answers = self.sample(self.racing, rounds)
        for solution in self.racing:
            answer = answers[solution]
            if isinstance(answer, Timing):
                self._failed[solution] = answer
                continue
            self.seconds += sum(answer.us) * answer.calls * 1e-6
            if counted:
                self._times.setdefault(solution, []).extend(answer.us)
                before = self._last.get(solution)
                throttled = answer.throttled or (before.throttled if before else "")
                self._last[solution] = attrs.evolve(answer, us=(), throttled=throttled)
        racing = [solution for solution in self.racing if solution not in self._failed]
        dropped = self._times.keys() - self._failed.keys() - set(racing)
        self.upset = len(racing) < len(self.racing) and bool(dropped)
        self.racing = racing

    def _affordable(self) -> int:
        """Return the number of rounds that the remaining device seconds allow."""
        cost = sum(self._times[solution][-1] * self._last[solution].calls * 1e-6 for solution in self.racing)
        return int(min((self.effort.seconds - self.seconds) / max(cost, 1e-9), BLOCK))

    def _decided(self, done: int) -> bool:
        """Drop clearly slower solutions; return whether the race is decided."""
        rivals = [solution for solution in self.racing if solution != self.ineligible] or self.racing
        best = min(rivals, key=lambda solution: _interval(self._times[solution], REPEATED)[0])
        left, open_questions = [best], 0
        for solution in self.racing:
            if solution == best:
                continue
            _, low, high = self._ratio(solution, best)
            if low > 1 + (CLOSE if done >= BLOCK else FAR) and solution not in self.spared:
                continue
            left.append(solution)
            open_questions += not (high <= 1 + CLOSE or low > 1 + CLOSE)
        self.racing = left
        return done >= FEWEST_ROUNDS and not open_questions and median_and_noise(self._level(best))[1] <= CLOSE

    def _ratio(self, solution: Solution, best: Solution) -> tuple[float, float, float]:
        pairs = zip(self._times[solution], self._times[best], strict=True)
        return _interval([mine / fastest for mine, fastest in pairs], REPEATED)

    def _level(self, solution: Solution) -> list[float]:
        return [us / factor for us, factor in zip(self._times[solution], self._drift(), strict=True)]

    def _drift(self) -> list[float]:
        """Return the slowdown of each round relative to the average, 1 for none.

        It is the smoothed median over the solutions that ran in all rounds.
        """
        rounds = max((len(self._times[solution]) for solution in self.racing), default=0)
        whole = [self._times[solution] for solution in self.racing]
        if not whole:
            return [1.0] * max(map(len, self._times.values()), default=0)
        relative = [[us / _median(times) for us in times] for times in whole]
        around = [range(max(0, number - REACH), min(rounds, number + REACH + 1)) for number in range(rounds)]
        factors = [_median([times[number] for times in relative for number in numbers]) for numbers in around]
        usual = _median(factors)
        return [factor / usual for factor in factors]


def _median(values: Sequence[float]) -> float:
    ordered, count = sorted(values), len(values)
    return ordered[count // 2] if count % 2 else (ordered[count // 2 - 1] + ordered[count // 2]) / 2


def _interval(values: Sequence[float], sigmas: float) -> tuple[float, float, float]:
    """Return the median and its confidence interval.

    The rank of the median has a standard deviation of sqrt(count) / 2 (binomial distribution).
    """
    ordered, count = sorted(values), len(values)
    reach = sigmas * math.sqrt(count) / 2
    return _median(ordered), ordered[max(0, int(count / 2 - reach))], ordered[min(count - 1, int(count / 2 + reach))]
