"""A relative change with its interval, which says "not resolved" instead of a number of noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import attrs

#: Confidence of an interval over turns. At 95 %, one of 20 equal pairs would seem to differ.
CONFIDENCE = 0.99


@attrs.frozen
class Estimate:
    """A relative change of a time.

    Attributes:
        share: the change; 0.03 is 3 % slower.
        noise: half width of its interval.
    """

    share: float
    noise: float

    @property
    def resolved(self) -> bool:
        """Tell whether the interval excludes no change."""
        return abs(self.share) > self.noise

    def exceeds(self, threshold: float) -> bool:
        """Tell whether it is resolved, and slower by at least a threshold."""
        return self.resolved and self.share >= threshold

    def __str__(self) -> str:
        text = f"{self.share:+.2%} ± {self.noise:.2%}"
        return text if self.resolved else f"not resolved ({text})"


def paired(ratios: Sequence[float], least: float = 0.0) -> Estimate:
    """Estimate the change behind the ratios of turns, by the t interval of their logarithms.

    Args:
        ratios: time over the baseline's, of at least two turns.
        least: the smallest half width.
    """
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    reach = t_quantile(len(logs) - 1) * statistics.stdev(logs, mean) / math.sqrt(len(logs))
    return Estimate(math.expm1(mean), max(least, math.exp(mean) * math.sinh(reach)))


def t_quantile(freedom: int) -> float:
    """Return Student's two-sided quantile at `CONFIDENCE`, within 2 % from four degrees of freedom.

    It is the Cornish-Fisher expansion (Abramowitz and Stegun 26.7.5).
    """
    z = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    terms: tuple[float, ...] = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum(term / float(freedom) ** power for power, term in enumerate(terms))
