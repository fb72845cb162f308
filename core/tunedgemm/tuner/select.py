"""Stage 6, select: the fastest correct solution.

Ties go to the incumbent, then by rank, then to more accurate solutions, then to first guesses. The
device tuner passes no incumbent, because it compares the winner with it in a paired comparison.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from tunedgemm.solution import Solution
from tunedgemm.timing import Timing

#: Smaller differences are always ties (AITER's hipb_prefer_ratio, for every backend).
TIE = 0.005
#: Gain over the baseline that a shape without a row needs. Smaller differences in one process are
#: not reproduced in the next.
DEFAULT_TIE = 0.01
#: Safety factor on noise, itself estimated from about 100 samples: copies of a kernel tie in 95 %.
UNSURE = 1.5
#: Difference in error ratio that makes a solution less accurate, such as fp8 accumulation without
#: promotion. Solutions that accumulate in fp32 differ by less.
EXACT = 1e-4
#: Cap of the noise that widens a tie.
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
        incumbent: the table's current solution.
        order: maps a libtype to its rank for ties.
        eligible: the libtypes that may be stored.
        guesses: the backends' untuned choices, the last criterion in ties. Memory speed varies over
            time, by 8 % on an H200, and solutions that tie in slow periods may differ in fast ones.

        Returns:
        The winner, or None if no solution passed; and the number of others that tied with it.
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
    """Return the relative difference up to which two times with these noises tie."""
    return max(TIE, min(UNSURE * math.hypot(noise, other), MAX_NOISE))
