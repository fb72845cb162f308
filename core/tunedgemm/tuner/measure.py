"""Stage 5, measure: finalists race in interleaved rounds; who is clearly slower drops out, and ties end it.

Clocks and temperatures drift by more than what decides between two kernels. So nothing is decided
from times of different moments: solutions are compared by the ratios of their samples within the
same rounds, and what all samples of a moment have in common is taken out of the times that come
back.
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

#: Rounds between two looks at who is behind; the first two looks come early, for most finalists are far behind.
BLOCK, FIRST_BLOCKS = 8, 4
#: Ratios closer to 1 than this count as equal, as they do when a winner is selected.
CLOSE = 0.005
#: In fewer rounds than a block, which make no interval to rely on, only who is behind by this in each of them drops out.
FAR = 0.03
#: Rounds of a duel at most.
COMPARISON_ROUNDS = 51
#: Seconds of calls of one solution alone, and how often it has its turn: on an H200 at its power cap what was 1.07 times as fast as torch's
#: call in rounds was so still in blocks of 0.1 s, 1.03 times in blocks of 0.4 s.
STEADY_S, TURNS = 0.4, 3
#: Fewest rounds before ties end a race.
FEWEST_ROUNDS = 16
#: Half widths of intervals in standard deviations: of a median that is reported, and of one that is looked at after
#: every block, among many.
REPORTED, REPEATED = 1.96, 3.0
#: Rounds to each side over which drift is smoothed: several medians' worth, and short beside how clocks move.
REACH = 4


@attrs.frozen
class Effort:
    """What may be spent on one race.

    Attributes:
        warmup: rounds that are run and not counted.
        iters: most rounds that count.
        seconds: device seconds, the warm-up's included; the first block of rounds is run whatever
            it takes.
        deadline: by `time.monotonic`; no block is begun after it but the first.
    """

    warmup: int
    iters: int
    seconds: float
    deadline: float = math.inf


def median_and_noise(samples: Sequence[float]) -> tuple[float, float]:
    """The median and the half width of its 95 % interval by order statistics, relative to it."""
    median, low, high = _interval(samples, REPORTED)
    return median, (high - low) / 2 / median if median else 0.0


def race(
    shape: Shape,
    finalists: Sequence[Solution],
    sample: Sample,
    effort: Effort,
    spared: Solution | None,
    beside: Solution | None = None,
) -> dict[Solution, Samples | Timing]:
    """Time finalists in interleaved rounds until it is clear which are the fastest, or the effort is spent.

    Args:
        shape: what is timed, for the log.
        spared: a finalist that stays to the end, however slow.
        beside: a finalist that is not to be chosen: nobody drops out because it is faster.

    Returns:
        A solution's samples in the order of the rounds, fewer where it dropped out, each without
        the drift of its moment; or the Timing that says how it failed.
    """
    lost: dict[Solution, Samples | Timing] = {}
    left = list(dict.fromkeys(finalists))
    while True:
        run = _Race(sample, effort, frozenset({spared} if spared else ()), left, beside)
        run.run(effort.iters)
        _log.debug("%s: %d finalists, %d to the end, %.2f s of the device", shape, len(left), len(run.racing), run.seconds)
        if not run.upset:
            return {**lost, **run.answers()}
        # Whom the one that failed had beaten was dropped too early: the rest race once more.
        lost |= {solution: timing for solution, timing in run.answers().items() if isinstance(timing, Timing)}
        left = [solution for solution in left if solution not in lost]
        effort = attrs.evolve(effort, warmup=0, seconds=effort.seconds - run.seconds)


def paired_comparison(few: Sequence[Solution], sample: Sample, effort: Effort) -> dict[Solution, Samples | Timing]:
    """The last comparison, of a few alone, none of which drops out: beside many candidates the chip runs hotter than beside one."""
    run = _Race(sample, effort, frozenset(few), list(dict.fromkeys(few)))
    run.run(min(effort.iters, COMPARISON_ROUNDS))
    return run.answers()


def steady(few: Mapping[Solution, Samples], sample: Sample) -> dict[Solution, Samples | Timing]:
    """Time a few each by itself, for as long as a chip takes to come to the clock that it keeps under it.

    A chip at its power cap needs for a call as long as its energy lasts. In rounds that mix
    solutions all run at one clock, and who saves time by spending more in it seems faster than a
    model finds it to be.

    Args:
        few: what is timed, with the samples that are known.

    Returns:
        The samples of the second half of each turn, as many of each; or the Timing that says how
        one failed.
    """
    found: dict[Solution, Samples | Timing] = {}
    rounds = max(2, math.ceil(STEADY_S * 1e6 / min(_median(known.us) * known.calls for known in few.values())))
    for turn in range(TURNS):
        for solution in list(few)[:: -1 if turn % 2 else 1]:
            before = found.get(solution)
            if isinstance(before, Timing):
                continue
            answer = sample((solution,), rounds)[solution]
            if isinstance(answer, Samples):
                answer = attrs.evolve(answer, us=(before.us if before else ()) + answer.us[len(answer.us) // 2 :])
            found[solution] = answer
    return found


@attrs.define(eq=False)
class _Race:
    """Rounds so far: whoever is racing has a sample of every round, who dropped out those of the first ones."""

    sample: Sample
    effort: Effort
    spared: frozenset[Solution]
    racing: list[Solution]
    beside: Solution | None = None
    seconds: float = 0.0
    upset: bool = False
    _times: dict[Solution, list[float]] = attrs.field(factory=dict)
    _last: dict[Solution, Samples] = attrs.field(factory=dict)
    _failed: dict[Solution, Timing] = attrs.field(factory=dict)

    def run(self, rounds: int) -> None:
        """Race for *rounds* at most, or until someone fails after others were dropped."""
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
        """What came of each solution."""
        drift = self._drift()
        found: dict[Solution, Samples | Timing] = dict(self._failed)
        for solution, times in self._times.items():
            if solution not in self._failed:
                us = tuple(us / factor for us, factor in zip(times, drift, strict=False))
                found[solution] = attrs.evolve(self._last[solution], us=us)
        return found

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
        """Rounds of those still racing that the device seconds left suffice for."""
        cost = sum(self._times[solution][-1] * self._last[solution].calls * 1e-6 for solution in self.racing)
        return int(min((self.effort.seconds - self.seconds) / max(cost, 1e-9), BLOCK))

    def _decided(self, done: int) -> bool:
        """Drop who is clearly slower; whether what is left is known well enough."""
        rivals = [solution for solution in self.racing if solution != self.beside] or self.racing
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
        """How slow the device was in each round, 1 being usual: the smoothed median over those who ran in all of them."""
        rounds = max((len(self._times[solution]) for solution in self.racing), default=0)
        whole = [self._times[solution] for solution in self.racing]
        if not whole:
            return [1.0] * max(map(len, self._times.values()), default=0)
        relative = [[us / _median(times) for us in times] for times in whole]
        around = [range(max(0, at - REACH), min(rounds, at + REACH + 1)) for at in range(rounds)]
        factors = [_median([times[place] for times in relative for place in places]) for places in around]
        usual = _median(factors)
        return [factor / usual for factor in factors]


def _median(values: Sequence[float]) -> float:
    ordered, count = sorted(values), len(values)
    return ordered[count // 2] if count % 2 else (ordered[count // 2 - 1] + ordered[count // 2]) / 2


def _interval(values: Sequence[float], sigmas: float) -> tuple[float, float, float]:
    """The median and its interval: the binomial deviation of the median's rank is half the root of the count."""
    ordered, count = sorted(values), len(values)
    reach = sigmas * math.sqrt(count) / 2
    return _median(ordered), ordered[max(0, int(count / 2 - reach))], ordered[min(count - 1, int(count / 2 + reach))]
