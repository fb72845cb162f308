"""Stage 3, screen: time all solutions roughly, refine the best, keep possible winners.

Rough timing takes few rounds of the same samples as the accurate phase, normalised by an anchor
solution in each group. Timing single launches would rank by launch overhead. One round is enough to
drop most solutions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import attrs

from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.timing import Timing
from tunedgemm.tuner.search import PASSES, Further
from tunedgemm.tuner.trial import Sample, Samples

#: Further rounds of the solutions that remain after the first.
MORE_ROUNDS = 2
#: A solution this much slower than the best of its libtype is dropped after one round.
HOPELESS = 1.35
#: Refinement stops after a pass that gains less.
WORTHWHILE = 0.01
#: Relative distance to the roofline below which refinement is skipped.
NEAR_FLOOR = 0.03
#: Finalists are at most this much slower than the best: the limits for consistent and noisy rounds.
NARROWEST, WIDEST = 0.06, 0.15
#: Solutions per sample of the anchor: at the power cap, the clock changes within tens of
#: milliseconds, which 64 solutions of a large shape take.
GROUP = 8
#: Largest effect of clocks on times (an H100: 1.4x); a larger change of the anchor is noise.
DRIFT = 1.6
#: The band of finalists beyond `NARROWEST`, in typical spreads of a solution's rounds.
SPREADS = 3.0


@attrs.frozen
class Screened:
    """Result of the screen.

    Attributes:
        survivors: the kept solutions, the fastest first.
        rough: microseconds of each solution that ran.
        dropped: timings of the dropped solutions.
    """

    survivors: tuple[Solution, ...]
    rough: dict[Solution, float]
    dropped: tuple[Timing, ...]


def screen(
    shape: Shape,
    checked: Sequence[Solution],
    sample: Sample,
    topk: int,
    further: Further,
    floor_us: float,
    ineligible: Solution | None = None,
) -> Screened:
    """Time roughly, refine, and keep possible winners.

    Args:
        shape: the shape.
        checked: correct solutions, each backend's best guesses first.
        sample: takes the samples.
        topk: most survivors per libtype, in addition to its first guess.
        further: sources of more solutions.
        floor_us: roofline lower bound of one call in microseconds; 0 if unknown.
        ineligible: one of *checked* that cannot win, so that it excludes no other.
    """
    state = _Screen(shape, sample, ineligible)
    state.add(checked)
    _add_rest(state, further)
    _refine(state, further, floor_us)
    kept = state.kept(checked, lambda libtype: min(topk, further.search(libtype).finalists or topk))
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
        """Return the microseconds of each solution: the (lower) median of its rounds.

        The first sample after a pause has a higher clock, by up to a third on an H100.
        """
        return {solution: sorted(times)[(len(times) - 1) // 2] for solution, times in self.times.items()}

    def is_timed(self, solution: Solution) -> bool:
        """Check whether a solution was timed or failed."""
        return solution in self.times or any(timing.solution == solution for timing in self.failed)

    def leaders(self, libtype: str) -> list[Solution]:
        """Return the solutions of a libtype, the fastest first."""
        rough = self.rough
        return sorted((solution for solution in rough if solution.libtype == libtype), key=rough.__getitem__)

    def best(self) -> dict[str, float]:
        """Return the shortest time per libtype, without the ineligible solution."""
        shortest: dict[str, float] = {}
        for solution, us in self.rough.items():
            if solution != self.ineligible:
                shortest[solution.libtype] = min(us, shortest.get(solution.libtype, us))
        return shortest

    def add(self, fresh: Sequence[Solution]) -> None:
        """Run one round of all solutions, and more rounds of promising ones."""
        rough = self.rough
        anchor = min(rough, key=rough.__getitem__) if rough else None
        self._rounds(fresh, 1, anchor)
        best = self.best()
        rough = self.rough
        hopeful = [s for s in fresh if s in rough and rough[s] <= HOPELESS * best.get(s.libtype, 0.0)]
        self._rounds(hopeful, MORE_ROUNDS, anchor)

    def _rounds(self, solutions: Sequence[Solution], rounds: int, anchor: Solution | None) -> None:
        """Time solutions in groups, each normalised by the anchor, by default the first that runs."""
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
        """Return the factor that normalises current times to those of the anchor's first samples."""
        if anchor not in self.times or not isinstance(answer, Samples):
            return 1.0
        return min(max(self.rough[anchor] / min(answer.us), 1 / DRIFT), DRIFT)

    def kept(self, checked: Sequence[Solution], most: Callable[[str], int]) -> list[Solution]:
        """Return each libtype's first guess, and its fastest within the band, fastest first."""
        rough, best = self.rough, self.best()
        limit = min(best.values(), default=0.0) * (1 + self._band())
        kept = set()
        for libtype in best:
            guesses = [solution for solution in checked if solution in rough and solution.libtype == libtype]
            kept |= {*guesses[:1], *(solution for solution in self.leaders(libtype)[: most(libtype)] if rough[solution] <= limit)}
        return sorted(kept, key=rough.__getitem__)

    def _band(self) -> float:
        spreads = sorted(max(times) / min(times) - 1 for times in self.times.values() if len(times) > 1)
        typical = spreads[len(spreads) // 2] if spreads else WIDEST
        return min(WIDEST, NARROWEST + SPREADS * typical)


def _add_rest(state: _Screen, further: Further) -> None:
    """Time the rest of each quickly searched list, unless its first solutions are far behind."""
    best = state.best()
    fastest = min(best.values(), default=0.0)
    near = {libtype for libtype in further.quick if best.get(libtype, 0.0) <= fastest * further.search(libtype).behind}
    leaders = _leaders(state, further, 0, near)
    fresh = [solution for solution in further.rest(near, leaders) if not state.is_timed(solution)] if near else []
    if fresh:
        state.add(fresh)


def _leaders(state: _Screen, further: Further, number: int, libtypes: Collection[str]) -> list[Solution]:
    """Return the solutions of these libtypes whose neighbours a pass of refinement tries."""
    best = state.best()
    fastest = min(best.values(), default=0.0)
    leaders = []
    for libtype in (libtype for libtype in best if libtype in libtypes):
        search = further.search(libtype)
        if best[libtype] <= fastest * search.passes[number]:
            leaders += state.leaders(libtype)[: search.leaders]
    return leaders


def _refine(state: _Screen, further: Further, floor_us: float) -> None:
    """Time neighbours of each libtype's best, once each, while that gains."""
    refined: set[Solution] = set()
    gaining = set(state.best())
    for number in range(PASSES):
        best = state.best()
        if min(best.values(), default=0.0) <= floor_us * (1 + NEAR_FLOOR):
            break
        leaders = [solution for solution in _leaders(state, further, number, gaining) if solution not in refined]
        refined |= set(leaders)
        fresh = list(dict.fromkeys(s for s in further.neighbours(leaders) if not state.is_timed(s))) if leaders else []
        if not fresh:
            break
        state.add(fresh)
        gaining = {libtype for libtype, us in state.best().items() if us < best.get(libtype, us) * (1 - WORTHWHILE)}
