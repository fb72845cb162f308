"""A relative change with its interval, which says "not resolved" instead of a number of noise."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Sequence

import attrs

#: Confidence of an interval over turns. At 95 %, one of 20 equal pairs would seem to differ.
CONFIDENCE = 0.99
#: Most turns whose ranks are counted exactly; beyond, their sum is normal.
_EXACT = 60


@attrs.frozen
class Estimate:
    """A relative change of a time.

    Attributes:
        share: the change; 0.03 is 3 % slower.
        low, high: its interval.
    """

    share: float
    low: float
    high: float

    @classmethod
    def around(cls, share: float, noise: float) -> Estimate:
        """Return a change with the half width of its interval."""
        return cls(share, share - noise, share + noise)

    @property
    def resolved(self) -> bool:
        """Tell whether the interval excludes no change."""
        return self.low > 0.0 or self.high < 0.0

    def exceeds(self, threshold: float) -> bool:
        """Tell whether it is resolved, and slower by at least a threshold."""
        return self.resolved and self.share >= threshold

    def __str__(self) -> str:
        text = f"{self.share:+.2%} [{self.low:+.2%}, {self.high:+.2%}]"
        return text if self.resolved else f"not resolved ({text})"


def paired(ratios: Sequence[float], least: float = 0.0) -> Estimate:
    """Estimate the change behind the ratios of turns, by Wilcoxon's signed ranks of their logarithms.

    A few turns that were disturbed move neither the change, which is Hodges' and Lehmann's, nor its
    interval.

    Args:
        ratios: time over the baseline's, of at least eight turns.
        least: the smallest half width.
    """
    logs = [math.log(ratio) for ratio in ratios]
    means = sorted((first + second) / 2 for first, second in itertools.combinations_with_replacement(logs, 2))
    rank = _rank(len(logs))
    share, low, high = (math.expm1(each) for each in (statistics.median(means), means[rank], means[-1 - rank]))
    return Estimate(share, min(low, share - least), max(high, share + least))


@functools.cache
def _rank(count: int) -> int:
    """Return how many means of pairs are outside each end of the interval.

    It is the largest sum of ranks that equal arms reach with at most half the error's probability.
    """
    most = count * (count + 1) // 2
    if count > _EXACT:
        deviation = math.sqrt(most * (2 * count + 1) / 12)
        return int(most / 2 - statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * deviation)
    ways = [1] + [0] * most  # of each sum, over all choices of ranks
    for rank in range(1, count + 1):
        for total in range(most, rank - 1, -1):
            ways[total] += ways[total - rank]
    within = itertools.takewhile(lambda share: share <= (1 - CONFIDENCE) / 2, (number / 2**count for number in itertools.accumulate(ways)))
    return max(0, sum(1 for _ in within) - 1)
