"""Stage 3, screen: a rough timing of all, the neighbours of the best, and the few that deserve the accurate phase.

Rough means few rounds of the same graphs that the accurate phase replays; never a bare launch, which would rank
solutions by launch overhead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from tunedgemm.launcher import Launcher
from tunedgemm.solution import Solution
from tunedgemm.timing import Timing
from tunedgemm.tuner.trial import Candidate, Sampler, Samples, Task, failed

ROUNDS = 3
#: Solutions of a libtype whose neighbours are tried, and how often at most.
REFINE_BEST, REFINE_PASSES = 5, 3
#: A pass of refinement that gains less ends it.
WORTHWHILE = 0.01


@attrs.frozen
class Screened:
    """The candidates that go on, their rough times, and the timings of those that do not."""

    survivors: tuple[Candidate, ...]
    rough: dict[Solution, float]
    dropped: tuple[Timing, ...]


def screen(
    task: Task, checked: Sequence[Candidate], sampler: Sampler, topk: int, neighbours: Callable[[Sequence[Candidate]], list[Candidate]]
) -> Screened:
    """Time roughly, refine, and keep *topk* of each libtype and each libtype's first guess.

    Args:
        checked: bound candidates whose output is right.
        neighbours: candidates to the checked ones around them.
    """
    rough: dict[Solution, float] = {}
    dropped: list[Timing] = []
    pool: dict[Solution, Candidate] = {}

    def add(fresh: Sequence[Candidate]) -> None:
        launchers = {candidate.solution: candidate.launcher for candidate in fresh if isinstance(candidate.launcher, Launcher)}
        for solution, samples in sampler(launchers, ROUNDS).items():
            if isinstance(samples, Samples):
                rough[solution] = min(samples.us)
            else:
                dropped.append(failed(task.shape, solution, samples))
        pool.update({candidate.solution: candidate for candidate in fresh if candidate.solution in rough})

    add(checked)
    for _ in range(REFINE_PASSES):
        best = {libtype: min(us for solution, us in rough.items() if solution.libtype == libtype) for libtype in {s.libtype for s in rough}}
        leaders = [c for libtype in best for c in _fastest(pool, rough, libtype)[:REFINE_BEST]]
        fresh = [candidate for candidate in neighbours(leaders) if candidate.solution not in pool]
        if not fresh:
            break
        add(fresh)
        after = [(best.get(solution.libtype, us), us) for solution, us in rough.items()]
        if not any(us < before * (1 - WORTHWHILE) for before, us in after):
            break
    kept = _kept(pool, rough, checked, topk)
    dropped += [Timing(task.shape, s, "screened", us=us, samples=ROUNDS) for s, us in rough.items() if s not in kept]
    return Screened(tuple(kept.values()), rough, tuple(dropped))


def _fastest(pool: dict[Solution, Candidate], rough: dict[Solution, float], libtype: str) -> list[Candidate]:
    mine = [candidate for solution, candidate in pool.items() if solution.libtype == libtype]
    return sorted(mine, key=lambda candidate: rough[candidate.solution])


def _kept(
    pool: dict[Solution, Candidate], rough: dict[Solution, float], checked: Sequence[Candidate], topk: int
) -> dict[Solution, Candidate]:
    kept: dict[Solution, Candidate] = {}
    for libtype in dict.fromkeys(solution.libtype for solution in pool):
        guesses = [candidate for candidate in checked if candidate.solution in pool and candidate.solution.libtype == libtype]
        for candidate in [*guesses[:1], *_fastest(pool, rough, libtype)[:topk]]:
            kept[candidate.solution] = candidate
    return kept
