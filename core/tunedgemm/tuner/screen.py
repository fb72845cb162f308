"""Stage 3, screen: time all solutions roughly, refine the best, keep the few possible winners.

Rough means few rounds of the samples of the accurate phase, scaled by a solution in each group. A
bare launch would rank solutions by launch overhead. Most solutions are hopeless, and one round
shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.timing import Timing
from tunedgemm.tuner.trial import Sample, Samples

#: Rounds of the solutions that the first round left.
MORE_ROUNDS = 2
#: A solution this many times slower than the best of its libtype is hopeless after one round.
HOPELESS = 1.35
#: Solutions of a libtype whose neighbours are tried, and for each pass of that, how far a libtype
#: may be behind the fastest. Of 180 lists that were over 5 % behind, no neighbour won, nor came
#: within 0.5 % (asm, skinny and Triton, 306 shapes in bf16 and fp8 by row, H100).
REFINE_BEST, REFINE_PASSES = 5, (1.1, 1.05, 1.05)
#: A pass of refinement that gains less ends it.
WORTHWHILE = 0.01
#: This near the least time that the hardware allows, neighbours have nothing to gain.
NEAR_FLOOR = 0.03
#: Finalists are at most this much slower than the best; the first value holds if rounds agree.
NARROWEST, WIDEST = 0.06, 0.15
#: Solutions timed with one sample of the anchor. A chip at its power cap changes its clock within
#: tens of milliseconds: 64 solutions of a large product heat it while they are timed once.
GROUP = 8
#: Clocks change times by at most this (an H100: 1.4 times). An anchor that differs more was
#: disturbed.
DRIFT = 1.6
#: The band is this many times the typical spread of a solution's rounds, beyond `NARROWEST`.
SPREADS = 3.0

Neighbours = Callable[[Sequence[Solution]], Sequence[Solution]]


@attrs.frozen
class Screened:
    """Result of the screen.

    Attributes:
        survivors: the kept solutions, the fastest first. rough: microseconds of a call of each
        solution that ran.
        dropped: timings of the others.
    """

    survivors: tuple[Solution, ...]
    rough: dict[Solution, float]
    dropped: tuple[Timing, ...]


def screen(
    shape: Shape,
    checked: Sequence[Solution],
    sample: Sample,
    topk: int,
    neighbours: Neighbours,
    floor_us: float,
    ineligible: Solution | None = None,
) -> Screened:
    """Time roughly, refine, and keep the few possible winners.

    Args:
        shape: the shape.
        checked: right solutions, in their backends' order: best guesses first.
        sample: takes the samples.
        topk: most survivors of each libtype, not counting its first guess.
        neighbours: returns checked solutions around some; slow, because it compiles them.
        floor_us: least microseconds of one call that the hardware allows; 0 if unknown.
        ineligible: one of *checked* that may not win: it excludes no other.
    """
    state = _Screen(shape, sample, ineligible)
    state.add(checked)
    _refine(state, neighbours, floor_us)
    kept = state.kept(checked, topk)
    screened = [Timing(shape, s, "screened", us=us, samples=len(state.times[s])) for s, us in state.rough.items() if s not in set(kept)]
    return Screened(tuple(kept), state.rough, (*state.failed, *screened))


@attrs.define(eq=False)
class _Screen:
    shape: Shape
    sample: Sample
    ineligible: Solution | None = None
    times: dict[Solution, list[float]] = attrs.field(factory=dict)
    failed: list[Timing] = attrs.field(factory=list)

    @property
    def rough(self) -> dict[Solution, float]:
        """Return the microseconds of each solution: the median of its rounds, of two the shorter.

        The first sample after a pause runs at a higher clock, by up to a third on an H100.
        """
        return {solution: sorted(times)[(len(times) - 1) // 2] for solution, times in self.times.items()}

    def is_timed(self, solution: Solution) -> bool:
        """Return whether a solution was timed, or failed."""
        return solution in self.times or any(timing.solution == solution for timing in self.failed)

    def leaders(self, libtype: str) -> list[Solution]:
        """Return the solutions of a libtype, the fastest first."""
        rough = self.rough
        return sorted((solution for solution in rough if solution.libtype == libtype), key=rough.__getitem__)

    def best(self) -> dict[str, float]:
        """Return the shortest time of each libtype, without the ineligible solution."""
        shortest: dict[str, float] = {}
        for solution, us in self.rough.items():
            if solution != self.ineligible:
                shortest[solution.libtype] = min(us, shortest.get(solution.libtype, us))
        return shortest

    def add(self, fresh: Sequence[Solution]) -> None:
        """Run one round of all, and more rounds of the promising ones."""
        rough = self.rough
        anchor = min(rough, key=rough.__getitem__) if rough else None
        self._rounds(fresh, 1, anchor)
        best = self.best()
        rough = self.rough
        hopeful = [s for s in fresh if s in rough and rough[s] <= HOPELESS * best.get(s.libtype, 0.0)]
        self._rounds(hopeful, MORE_ROUNDS, anchor)

    def _rounds(self, solutions: Sequence[Solution], rounds: int, anchor: Solution | None) -> None:
        """Time solutions in groups, each with the anchor; without one, the first solution that runs.

        The anchor shows changes of the clock, by which the times of its group are scaled.
        """
        for first in range(0, len(solutions), GROUP):
            group = solutions[first : first + GROUP]
            anchor = anchor if anchor in self.times else next(iter(self.times), group[0])
            answers = self.sample(list(dict.fromkeys([*group, anchor])), rounds)
            factor = self._clock_factor(anchor, answers[anchor])
            for solution in group:
                answer = answers[solution]
                if isinstance(answer, Samples):
                    self.times.setdefault(solution, []).extend(us * factor for us in answer.us)
                else:
                    self.times.pop(solution, None)
                    self.failed.append(answer)

    def _clock_factor(self, anchor: Solution, answer: Samples | Timing) -> float:
        """Return the factor from times of now to times of the anchor's first sample."""
        if anchor not in self.times or not isinstance(answer, Samples):
            return 1.0
        return min(max(self.rough[anchor] / min(answer.us), 1 / DRIFT), DRIFT)

    def kept(self, checked: Sequence[Solution], topk: int) -> list[Solution]:
        """Return each libtype's first guess and its fastest within the band, the fastest first."""
        rough, best = self.rough, self.best()
        limit = min(best.values(), default=0.0) * (1 + self._band())
        kept = set()
        for libtype in best:
            guesses = [solution for solution in checked if solution in rough and solution.libtype == libtype]
            kept |= {*guesses[:1], *(solution for solution in self.leaders(libtype)[:topk] if rough[solution] <= limit)}
        return sorted(kept, key=rough.__getitem__)

    def _band(self) -> float:
        spreads = sorted(max(times) / min(times) - 1 for times in self.times.values() if len(times) > 1)
        typical = spreads[len(spreads) // 2] if spreads else WIDEST
        return min(WIDEST, NARROWEST + SPREADS * typical)


def _refine(state: _Screen, neighbours: Neighbours, floor_us: float) -> None:
    """Try the neighbours of each libtype's best while that gains; query each solution once."""
    refined: set[Solution] = set()
    gaining = set(state.best())
    for behind in REFINE_PASSES:
        best = state.best()
        fastest = min(best.values(), default=0.0)
        if fastest <= floor_us * (1 + NEAR_FLOOR):
            break
        worth = [libtype for libtype in best if libtype in gaining and best[libtype] <= behind * fastest]
        leaders = [solution for libtype in worth for solution in state.leaders(libtype)[:REFINE_BEST] if solution not in refined]
        refined |= set(leaders)
        fresh = list(dict.fromkeys(s for s in neighbours(leaders) if not state.is_timed(s))) if leaders else []
        if not fresh:
            break
        state.add(fresh)
        gaining = {libtype for libtype, us in state.best().items() if us < best.get(libtype, us) * (1 - WORTHWHILE)}
