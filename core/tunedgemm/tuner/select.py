"""Stage 6, select: the fastest correct solution.

Ties go to the incumbent, then by rank, then to more exact solutions, then to first guesses. The
device tuner passes no incumbent, because its winner meets it in a paired comparison.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.timing import Timing

#: Smaller differences are ties whatever the noise (AITER's hipb_prefer_ratio, for every backend).
TIE = 0.005
#: The baseline keeps a shape without a row unless a solution is faster by this. Smaller differences
#: in one process are not reproduced in the next.
DEFAULT_TIE = 0.01
#: Noise is itself an estimate, from about 100 samples: with this factor, copies of one kernel tie
#: 95 times in 100.
UNSURE = 1.5
#: Larger differences in the share of elements outside the tolerance make a solution less exact, as
#: 8-bit sums without promotion are. Solutions that sum in fp32 differ by less.
EXACT = 1e-4
#: Larger noise does not widen a tie.
MAX_NOISE = 0.03


def select(
    timings: Sequence[Timing],
    incumbent: Solution | None,
    order: Mapping[str, int],
    eligible: Sequence[str],
    guesses: Collection[Solution] = (),
) -> tuple[Timing | None, int]:
    """Choose the row of the table.

    Args:
        timings: timings of the candidates.
        incumbent: the table's present solution.
        order: libtype to its rank for ties.
        eligible: the libtypes that may be stored.
        guesses: the backends' choices without tuning. Device memory is faster at some times than at
            others, by 8 % on an H200. Solutions that tie in a slow moment differ in a fast one, and
            a guess is then better than chance.

    Returns:
        The winner, or None if no solution passed; and how many others tied with it.
    """
    passed = [timing for timing in timings if timing.ok and timing.solution.libtype in eligible]
    if not passed:
        return None, 0
    fastest = min(passed, key=lambda timing: timing.us)
    tied = [timing for timing in passed if timing.us <= fastest.us * (1 + tie_margin(fastest.noise, timing.noise))]

    def preference(timing: Timing) -> tuple[bool, int, bool, bool, float]:
        solution = timing.solution
        least = min(other.err_ratio for other in tied if other.solution.libtype == solution.libtype)
        rank, is_less_exact = order.get(solution.libtype, len(order)), timing.err_ratio > least + EXACT
        return solution != incumbent, rank, is_less_exact, solution not in guesses, timing.us

    return min(tied, key=preference), len(tied) - 1


def tie_margin(noise: float, other: float) -> float:
    """Return the relative difference up to which two times with these noises count as equal."""
    return max(TIE, min(UNSURE * math.hypot(noise, other), MAX_NOISE))


def select_pin(
    timings: Mapping[Shape, Sequence[Timing]],
    counts: Mapping[Shape, int],
    incumbent: Solution | None,
    order: Mapping[str, int],
    eligible: Sequence[str],
) -> Solution | None:
    """Choose a solution for all M of an (N, K): right for every shape, least time over the
    workload.
    """
    passed = [
        {timing.solution: timing for timing in group if timing.ok and timing.solution.libtype in eligible} for group in timings.values()
    ]
    weights = [max(1, counts.get(shape, 1)) for shape in timings]
    totals: list[Timing] = []
    for solution in set.intersection(*map(set, passed)) if passed else ():
        spent = [weight * group[solution].us for weight, group in zip(weights, passed, strict=True)]
        wide = [us * group[solution].noise for us, group in zip(spent, passed, strict=True)]
        first = passed[0][solution]
        totals.append(Timing(first.shape, first.solution, "ok", us=sum(spent), noise=math.hypot(*wide) / sum(spent)))
    winner, _ = select(sorted(totals, key=lambda total: str(total.solution)), incumbent, order, eligible)
    return None if winner is None else winner.solution
