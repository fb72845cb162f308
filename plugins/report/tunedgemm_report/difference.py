"""Two sides: which shapes got faster, slower, new, or are gone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import attrs
from tunedgemm.analysis.results import SLOWER, Entry, Findings, Winner, tie_margin
from tunedgemm.plugin import Shape

#: verdict -> its meaning, in the order of the page
VERDICTS = {
    "slower": "the second is slower beyond noise",
    "faster": "the second is faster beyond noise",
    "equal": "within 2 %, or within the noise of both",
    "new": "the first has no winner for this shape",
    "gone": "the second has no winner for this shape",
}


@attrs.frozen
class Change:
    """One shape on both sides; an entry is None where a side has no winner for it."""

    first: Entry | None
    second: Entry | None

    @property
    def entry(self) -> Entry:
        """Return the second's entry, else the first's."""
        entry = self.second or self.first
        if entry is None:
            raise ValueError("a change needs an entry")
        return entry

    @property
    def weight(self) -> int:
        """Return the calls by which the shape counts."""
        return max(entry.weight for entry in (self.first, self.second) if entry is not None)

    @property
    def ratio(self) -> float:
        """Return the first's time over the second's, 0 where one is missing."""
        times = [_winner(entry).us if entry is not None else 0.0 for entry in (self.first, self.second)]
        return times[0] / times[1] if all(times) else 0.0

    @property
    def verdict(self) -> str:
        """Return a word of `VERDICTS`."""
        if self.first is None or self.second is None:
            return "new" if self.first is None else "gone"
        noise = tie_margin(_winner(self.first).noise, _winner(self.second).noise)
        equal = max(1 / SLOWER, 1 + noise)
        return "faster" if self.ratio > equal else "slower" if self.ratio < 1 / equal else "equal"


@attrs.frozen
class Difference:
    """The changes between two sides.

    Attributes:
        changes: a change for each shape, the largest first.
        across: whether shapes of different devices are compared, as no device is in both.
    """

    changes: tuple[Change, ...]
    across: bool = False

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of changes of each verdict."""
        counts = Counter(change.verdict for change in self.changes)
        return {word: counts[word] for word in VERDICTS}

    @property
    def gain(self) -> tuple[float, float]:
        """Return the mean ratio, weighted by calls, and the ratio of all times; 0 without common shapes."""
        common = [(change.weight, change.ratio, _winner(change.first).us) for change in self.changes if change.ratio and change.first]
        total = sum(weight for weight, _, _ in common)
        if not total:
            return 0.0, 0.0
        mean = math.exp(sum(weight * math.log(ratio) for weight, ratio, _ in common) / total)
        before = sum(weight * us for weight, _, us in common)
        return mean, before / sum(weight * us / ratio for weight, ratio, us in common)


def _winner(entry: Entry) -> Winner:
    winner = entry.winner
    if winner is None:
        raise ValueError(f"{entry.shape} has no winner")
    return winner


def difference(first: Findings, second: Findings) -> Difference:
    """Compare the winners of two sides, by device and shape.

    Without a common device they are compared by shape alone, if each has one device.
    """
    before, after = _won(first), _won(second)
    across = not {device for device, _ in before} & {device for device, _ in after}
    across = across and len(first.devices) == len(second.devices) == 1
    if across:
        left, right = _by_shape(before), _by_shape(after)
        changes = [Change(left.get(shape), right.get(shape)) for shape in {**left, **right}]
    else:
        changes = [Change(before.get(key), after.get(key)) for key in {**before, **after}]
    order = {word: index for index, word in enumerate(VERDICTS)}

    def size(change: Change) -> tuple[bool, float, int]:
        return not change.ratio, -abs(math.log(change.ratio)) if change.ratio else 0.0, order[change.verdict]

    return Difference(tuple(sorted(changes, key=size)), across)


def _won(findings: Findings) -> dict[Any, Entry]:
    return {key: entry for key, entry in findings.entries.items() if entry.winner is not None and entry.winner.us}


def _by_shape(entries: Mapping[Any, Entry]) -> dict[Shape, Entry]:
    return {shape: entry for (_, shape), entry in entries.items()}
