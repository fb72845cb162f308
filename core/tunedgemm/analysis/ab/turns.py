"""Turns of the arms, and the verdict on them.

In each turn every arm runs once, in random order, and arm A runs twice: the second is the A/A
control, which shows what differs without a cause.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping

import attrs

from tunedgemm.analysis.estimate import Estimate, paired

#: The arms of each turn.
A, B, AGAIN = ARMS = ("a", "b", "again")
#: Fewest turns: with fewer, equal arms all lie on one side too often for the interval's confidence.
FEWEST_TURNS = 8


@attrs.frozen
class Result:
    """The numbers of each turn.

    Attributes:
        turns: the number of each arm, by turn.
        more: whether more is better, as tokens per second.
        least: least half width of an interval.
        ended: why it ended early; "" if all turns are there.
    """

    turns: tuple[Mapping[str, float], ...]
    more: bool = False
    least: float = 0.0
    ended: str = ""

    @functools.cached_property
    def effect(self) -> Estimate | None:
        """Return how much slower B is than A; None with too few turns.

        The mean of both runs of A would be less noisy. But signed ranks need equal arms to be as
        often faster as slower, and a mean of skewed times is not.
        """
        return self._estimate(B)

    @functools.cached_property
    def control(self) -> Estimate | None:
        """Return how much slower the second run of A is than the first."""
        return self._estimate(AGAIN)

    def _estimate(self, arm: str) -> Estimate | None:
        if len(self.turns) < FEWEST_TURNS:
            return None
        ratios = [turn[arm] / turn[A] for turn in self.turns]
        return paired([1 / ratio for ratio in ratios] if self.more else ratios, self.least)

    @property
    def verdict(self) -> str:
        """Return ``slower``, ``faster`` or ``not resolved``.

        An effect counts only outside its interval, and beyond what the A/A control differs by.
        """
        effect, control = self.effect, self.control
        if effect is None or control is None:
            return "not resolved"
        least = abs(control.share) if control.resolved else 0.0
        return "slower" if effect.low > least else "faster" if effect.high < -least else "not resolved"

    def exceeds(self, threshold: float) -> bool:
        """Tell whether B is slower, and by at least a threshold."""
        return self.verdict == "slower" and self.effect is not None and self.effect.share >= threshold


def take_turns(
    run: Callable[[str], float], count: int, *, more: bool = False, seed: int = 0, keep: Callable[[Result], None] = lambda _: None
) -> Result:
    """Run the arms in turns; a turn before them is not counted.

    Args:
        run: runs an arm and returns its number.
        count: turns that count.
        more: whether more is better.
        seed: of the orders.
        keep: called with the result so far after each turn.

    Raises:
        Exception: *run* raised; *keep* has the turns before.
    """
    orders, result = random.Random(seed), Result((), more)
    for turn in range(count + 1):
        numbers = {arm: run(arm) for arm in orders.sample(ARMS, len(ARMS))}
        if turn:
            result = attrs.evolve(result, turns=(*result.turns, {arm: numbers[arm] for arm in ARMS}))
            keep(result)
    return result
