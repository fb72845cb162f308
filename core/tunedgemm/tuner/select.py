"""Stage 6, select: the fastest right one; what is as fast within noise goes to the incumbent where one is given, then by rank, then to
a backend's first guess.

The lane gives none: whom select chooses meets what serves the shape now in a duel.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.timing import Timing

#: Differences below this are ties whatever the noise says (AITER's hipb_prefer_ratio, for every backend).
TIE = 0.005
#: Torch's own call keeps a shape that has no row unless something is faster by this: what decides less than a percent
#: in one process is not found again in the next.
DEFAULT_TIE = 0.01
#: Noise is itself estimated, from about a hundred samples: copies of one kernel tie 95 times in 100 with this factor.
UNSURE = 1.5
#: Noise beyond this is no reason to call a tie.
MAX_NOISE = 0.03


def select(
    timings: Sequence[Timing],
    incumbent: Solution | None,
    order: Mapping[str, int],
    eligible: Sequence[str],
    keep: float = TIE,
    guesses: Collection[Solution] = (),
) -> tuple[Timing | None, int]:
    """Choose the row of the table.

    Args:
        timings: what became of the candidates.
        incumbent: the solution that serves the shape now.
        order: libtype to its place for ties.
        eligible: the libtypes that may be stored.
        keep: how much slower than the fastest the incumbent may be and still stay.
        guesses: what its backend would have taken untimed. A device's memory is faster at one time
            than at another, by 8 % on an H200; what ties in a slow one is told apart in a fast one,
            and then a guess is the better bet than the luck of a tie.

    Returns:
        The winner, None where nothing passed, and how many others tied with it.
    """
    passed = [timing for timing in timings if timing.ok and timing.solution.libtype in eligible]
    if not passed:
        return None, 0
    fastest = min(passed, key=lambda timing: timing.us)
    tied = [
        timing for timing in passed if timing.us <= fastest.us * (1 + max(margin(fastest, timing), keep * (timing.solution == incumbent)))
    ]

    def preference(timing: Timing) -> tuple[bool, int, bool, float]:
        libtype = timing.solution.libtype
        return timing.solution != incumbent, order.get(libtype, len(order)), timing.solution not in guesses, timing.us

    return min(tied, key=preference), len(tied) - 1


def margin(fastest: Timing, other: Timing) -> float:
    """The relative difference up to which two timings count as equal."""
    return max(TIE, min(UNSURE * math.hypot(fastest.noise, other.noise), MAX_NOISE))


def select_pin(
    timings: Mapping[Shape, Sequence[Timing]],
    counts: Mapping[Shape, int],
    incumbent: Solution | None,
    order: Mapping[str, int],
    eligible: Sequence[str],
) -> Solution | None:
    """Choose one solution for all M of an (N, K): right for every shape, and the least time over the workload.

    Args:
        timings: what became of the candidates, by shape.
        counts: how often the workload ran each shape; 1 where it does not say.
        incumbent: the solution that is pinned now.
        order: libtype to its place for ties.
        eligible: the libtypes that may be stored.

    Returns:
        None where no solution passed everywhere.
    """
    passed = [
        {timing.solution: timing for timing in group if timing.ok and timing.solution.libtype in eligible} for group in timings.values()
    ]
    weights = [max(1, counts.get(shape, 1)) for shape in timings]
    totals: list[Timing] = []
    for solution in set.intersection(*map(set, passed)) if passed else ():
        spent = [weight * group[solution].us for weight, group in zip(weights, passed, strict=True)]
        wide = [us * group[solution].noise for us, group in zip(spent, passed, strict=True)]
        one = passed[0][solution]
        totals.append(Timing(one.shape, one.solution, "ok", us=sum(spent), noise=math.hypot(*wide) / sum(spent)))
    winner, _ = select(sorted(totals, key=lambda total: str(total.solution)), incumbent, order, eligible)
    return None if winner is None else winner.solution
