"""A tuned shape in result files: its trials, row and calls, and derived figures."""

from __future__ import annotations

import math
from typing import NamedTuple

import attrs

from tunedgemm.device import Device
from tunedgemm.libtypes import BUILTIN
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.tuner.roofline import LAUNCH_US, ceilings_of, floor_us, pace
from tunedgemm.tuner.select import tie_margin

#: torch's call, the baseline of all gains.
BASELINE = f"{BUILTIN}:native"
#: Statuses of a trial that has a time.
TIMED = ("ok", "screened")
#: Gfx of files that name no device.
UNKNOWN = "unknown"


class Trial(NamedTuple):
    """The last trial of a solution at a shape; *us* is 0 if it was not timed."""

    libtype: str
    status: str
    us: float
    noise: float
    samples: int
    detail: str


@attrs.frozen
class Winner:
    """The chosen solution of a shape; *us* is 0 if unknown."""

    solution: str
    libtype: str
    us: float
    noise: float = 0.0


@attrs.frozen
class Roof:
    """Roofline of a device for a shape.

    Attributes:
        pace: peak FLOP/s for the shape's dtypes relative to bf16.
        bytes_s, flop_s: peak bytes/s and FLOP/s.
        launch_us: launch overhead in microseconds.
    """

    pace: float
    bytes_s: float
    flop_s: float
    launch_us: float


@attrs.define(eq=False)
class Entry:
    """The results for one shape on one device.

    Attributes:
        device, op, shape: the key.
        trials: the last trial of each solution.
        row: the winner in a table, the fastest if several.
        outcome: the winner in the log; None if no solution passed.
        ended: whether the log has an outcome.
        reason: why no solution passed.
        tied: number of solutions that tied with the outcome; -1 if unknown.
        seconds: seconds of tuning by activity.
        calls: calls in lists of captured shapes; 0 if unknown.
        layer: names of the layers; "" if unknown.
    """

    device: Device
    op: Op
    shape: Shape
    trials: dict[str, Trial] = attrs.field(factory=dict)
    row: Winner | None = None
    outcome: Winner | None = None
    ended: bool = False
    reason: str = ""
    tied: int = -1
    seconds: dict[str, float] = attrs.field(factory=dict)
    calls: int = 0
    layer: str = ""

    def put_row(self, row: Winner) -> None:
        """Take a table's row unless an earlier one is faster."""
        if self.row is None or row.us < self.row.us:
            self.row = row

    def join(self, other: Entry) -> None:
        """Add what another file says about the same shape; this entry's own trials stay."""
        self.trials = other.trials | self.trials
        if other.row is not None:
            self.put_row(other.row)
        if not self.ended:
            self.outcome, self.ended, self.reason, self.tied = other.outcome, other.ended, other.reason, other.tied
        for activity, seconds in other.seconds.items():
            self.seconds[activity] = self.seconds.get(activity, 0.0) + seconds

    @property
    def winner(self) -> Winner | None:
        """Return the table's row, else the log's outcome, else the fastest trial that passed."""
        chosen = self.row or self.outcome
        if chosen is not None:
            trial = self.trials.get(chosen.solution)
            return chosen if trial is None or chosen.noise else attrs.evolve(chosen, noise=trial.noise)
        if self.ended:
            return None
        passed = [(trial.us, name) for name, trial in self.trials.items() if trial.status == "ok" and trial.us > 0.0]
        if not passed:
            return None
        name = min(passed)[1]
        best = self.trials[name]
        return Winner(name, best.libtype, best.us, best.noise)

    @property
    def torch_us(self) -> float:
        """Return the microseconds of torch's call; 0 if it was not timed."""
        trial = self.trials.get(BASELINE)
        return trial.us if trial is not None and trial.status in TIMED else 0.0

    @property
    def gain(self) -> float:
        """Return the winner's speed-up over torch; 0 if a time is unknown."""
        winner, torch_us = self.winner, self.torch_us
        if winner is None or not winner.us or not torch_us:
            return 0.0
        return 1.0 if winner.solution == BASELINE else torch_us / winner.us

    @property
    def floor_us(self) -> float:
        """Return the roofline lower bound in microseconds; 0 if unknown."""
        return floor_us(self.op, self.shape, self.device)

    @property
    def roof(self) -> Roof | None:
        """Return the ceilings of the device for this shape, None for unknown ones."""
        ceilings = ceilings_of(self.device)
        if ceilings is None:
            return None
        rate = pace(self.shape, self.device)
        return Roof(rate, ceilings[0], ceilings[1] * rate, LAUNCH_US)

    @property
    def ties(self) -> int:
        """Return the number of solutions that tie with the winner."""
        if self.tied >= 0:
            return self.tied
        winner = self.winner
        if winner is None:
            return 0
        passed = (trial for name, trial in self.trials.items() if trial.status == "ok" and name != winner.solution)
        return sum(0.0 < trial.us <= winner.us * (1 + tie_margin(winner.noise, trial.noise)) for trial in passed)

    @property
    def weight(self) -> int:
        """Return the calls by which this shape counts: 1 where they are unknown."""
        return max(self.calls, 1)


@attrs.frozen
class Gain:
    """The gains of some shapes over torch.

    Attributes:
        shapes: how many have a gain.
        mean: their geometric mean, weighted by calls.
        time: torch's time of all calls over that of the winners.
    """

    shapes: int
    mean: float
    time: float


def gain_of(entries: list[Entry]) -> Gain | None:
    """Return the gain of some shapes together; None where none has a gain."""
    known = [(entry.weight, gain, entry.torch_us) for entry in entries if (gain := entry.gain)]
    if not known:
        return None
    total = sum(weight for weight, _, _ in known)
    mean = math.exp(sum(weight * math.log(gain) for weight, gain, _ in known) / total)
    before = sum(weight * us for weight, _, us in known)
    return Gain(len(known), mean, before / sum(weight * us / gain for weight, gain, us in known))
