"""The values that the stages hand to each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from tunedgemm.accuracy import MAX_ERROR_RATIO
from tunedgemm.device import Device
from tunedgemm.errors import OutOfResources, UserError
from tunedgemm.launcher import Launcher
from tunedgemm.ops.op import Op
from tunedgemm.registry import Backend
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.timing import Timing


def _at_least(least: float) -> Callable[[object, attrs.Attribute, Any], None]:
    def check(_: object, attribute: attrs.Attribute, value: Any) -> None:
        if not value >= least:
            raise UserError(f"--{attribute.name} must be at least {least:g} (got {value})")

    return check


@attrs.frozen
class Options:
    """How to tune; the CLI's flags of the same names say the same.

    Attributes:
        libtype: ``all`` or a comma list of libtypes, which also decides ties.
        errRatio: largest share of elements outside the op's tolerance.
        warmup: rounds that are run and not counted.
        iters: most rounds that a solution is timed in.
        topk: solutions of each libtype that reach the accurate phase.
        batch: shapes whose kernels are compiled ahead together.
        timeout: seconds that one compilation may take; 0 is no limit.
        all: tune shapes that the output table already has, too.
        sort: order the output by its key, N before M.
        jobs: processes that compile ahead; 0 is one for each core.
        seconds: device seconds that the accurate phase may spend on one shape.
        profile: a CSV that gets every candidate's result, or None.
    """

    libtype: str = "all"
    errRatio: float = attrs.field(default=MAX_ERROR_RATIO, validator=_at_least(0.0))
    warmup: int = attrs.field(default=5, validator=_at_least(0))
    iters: int = attrs.field(default=101, validator=_at_least(1))
    topk: int = attrs.field(default=20, validator=_at_least(1))
    batch: int = attrs.field(default=100, validator=_at_least(1))
    timeout: float = attrs.field(default=1800.0, validator=_at_least(0.0))
    all: bool = False
    sort: bool = True
    jobs: int = attrs.field(default=0, validator=_at_least(0))
    seconds: float = attrs.field(default=4.0, validator=_at_least(0.0))
    profile: Path | None = None


@attrs.frozen
class Task:
    """One shape to tune: how often the workload ran it, and the solution its table has now."""

    shape: Shape
    count: int = 1
    incumbent: Solution | None = None


@attrs.frozen(eq=False)
class Candidate:
    """A solution that one backend offers for the shape at hand, and its launcher once it is bound."""

    solution: Solution
    backend: Backend
    launcher: Launcher | None = None


@attrs.frozen
class Samples:
    """Times of one solution, a sample a round: microseconds of one call."""

    us: tuple[float, ...]
    clock_mhz: int = 0


#: (launchers by solution, rounds) -> samples by solution; what raised comes back as the exception.
Sampler = Callable[[Mapping[Solution, Launcher], int], dict[Solution, Samples | Exception]]
#: Makes the sampler of one shape: `tunedgemm.tuner.measure.Workload`, or a replay.
Bench = Callable[[Op, Shape, Device], Sampler]


@attrs.frozen
class Outcome:
    """What tuning one shape gave.

    Attributes:
        task: the shape.
        winner: the timing that goes to the table; None where nothing passed.
        reference: torch's own call, timed beside the others; None where it failed.
        timings: every candidate's.
        tied: solutions that were as fast as the winner within noise.
        seconds: wall time by activity: check (bind and verify), compile, time.
    """

    task: Task
    winner: Timing | None
    reference: Timing | None
    timings: tuple[Timing, ...] = ()
    tied: int = 0
    seconds: tuple[tuple[str, float], ...] = ()

    @property
    def gain(self) -> float:
        """Times faster than torch's own call; 0 where either is missing."""
        if self.winner is None or self.reference is None or not self.reference.ok:
            return 0.0
        return self.reference.us / self.winner.us


@attrs.frozen
class Report:
    """What a whole run gave."""

    device: Device
    output: Path
    outcomes: tuple[Outcome, ...]
    skipped: tuple[Shape, ...] = ()

    @property
    def failed(self) -> Sequence[Outcome]:
        """The shapes for which nothing passed."""
        return [outcome for outcome in self.outcomes if outcome.winner is None]


def failed(shape: Shape, solution: Solution, error: Exception) -> Timing:
    """The Timing of a solution that raised."""
    import torch

    status = "failed"
    if isinstance(error, OutOfResources):
        status = "out_of_resources"
    elif isinstance(error, torch.OutOfMemoryError | MemoryError):
        status = "out_of_memory"
    return Timing(shape, solution, status, detail=f"{type(error).__name__}: {error}"[:500])
