"""The values that the stages hand to each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from tunedgemm.backends.launcher import Launcher
from tunedgemm.device import Device
from tunedgemm.errors import OutOfResources, TunedGemmError, UserError
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.timing import Timing
from tunedgemm.tuner.accuracy import MAX_ERROR_RATIO


def _at_least(least: float) -> Callable[[object, attrs.Attribute, Any], None]:
    def check(_: object, attribute: attrs.Attribute, value: Any) -> None:
        if not value >= least:
            raise UserError(f"--{attribute.name} must be at least {least:g} (got {value})")

    return check


def _a_share(_: object, attribute: attrs.Attribute, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise UserError(f"--{attribute.name} is a share of the elements, 0 to 1 (got {value})")


def _one_of(*words: str) -> Callable[[object, attrs.Attribute, Any], None]:
    def check(_: object, attribute: attrs.Attribute, value: Any) -> None:
        if value not in words:
            raise UserError(f"--{attribute.name} must be one of {', '.join(words)} (got {value!r})")

    return check


def _a_part(_: object, attribute: attrs.Attribute, value: tuple[int, int]) -> None:
    part, parts = value
    if not 1 <= part <= parts:
        raise UserError(f"--{attribute.name} must be I/N with 1 <= I <= N (got {part}/{parts})")


@attrs.frozen
class Options:
    """How to tune; the CLI's flags of the same names say the same.

    Attributes:
        libtype: ``all`` or a comma list of libtypes, which also decides ties.
        errRatio: largest share of elements outside the tolerance.
        atol, rtol: the tolerance of an element, ``|out - ref| <= atol + rtol * |ref|``; None for
            the op's own.
        deterministic: only solutions that gave the same bits in repeated runs.
        batch_invariant: only solutions whose rows have the same bits whatever M; one is pinned for
            each (N, K), with M = 0.
        cache: ``cold`` rotates the weights through memory, ``hot`` uses one copy.
        timing: ``graph`` replays captured calls, ``eager`` launches them.
        warmup: rounds that are run and not counted.
        iters: most rounds that a solution is timed in.
        candidates: most solutions of each libtype that are tried, its best guesses and their
            neighbours; 0 is all.
        topk: solutions of each libtype that reach the accurate phase.
        seconds: device seconds that the accurate phase may spend on one shape.
        budget: wall seconds of the whole run, spent first where count times time is largest; 0 is
            no limit.
        whole: with a budget, all M of one (N, K) come before the next one's.
        batch: shapes whose kernels are compiled ahead of the one that is timed.
        timeout: seconds that one compilation, or binding one solution, may take; 0 is no limit.
        kernel_timeout: seconds that the calls of one solution may take until it counts as hung; 0
            is no limit.
        all: tune shapes that the output table already has, too.
        stale: tune only rows of the output table whose library has another version now.
        resume: reuse the trials of an interrupted run of the same kind.
        shard: (i, n): only the i-th of n parts of the shapes.
        sort: order the output by its key, N before M.
        jobs: processes that compile ahead; 0 is one for each core.
        mp: devices of this machine to tune on at once; 0 is all GPUs, or the CPU.
        device: which devices of this machine: GPU indices as a comma list, or ``cpu``; "" is all
            GPUs, or the CPU.
        executor: ``local``, or ``ray``: every GPU of a Ray cluster, or a CPU lane on each of its
            nodes where it has none.
        ray_address: the cluster; "" is the one that Ray finds or starts by itself.
        profile: a CSV that gets every candidate's result, or None.
    """

    libtype: str = "all"
    errRatio: float = attrs.field(default=MAX_ERROR_RATIO, validator=_a_share)
    atol: float | None = attrs.field(default=None, validator=attrs.validators.optional(_at_least(0.0)))
    rtol: float | None = attrs.field(default=None, validator=attrs.validators.optional(_at_least(0.0)))
    deterministic: bool = False
    batch_invariant: bool = False
    cache: str = attrs.field(default="cold", validator=_one_of("cold", "hot"))
    timing: str = attrs.field(default="graph", validator=_one_of("graph", "eager"))
    warmup: int = attrs.field(default=5, validator=_at_least(0))
    iters: int = attrs.field(default=101, validator=_at_least(1))
    candidates: int = attrs.field(default=0, validator=_at_least(0))
    topk: int = attrs.field(default=20, validator=_at_least(1))
    seconds: float = attrs.field(default=4.0, validator=_at_least(0.0))
    budget: float = attrs.field(default=0.0, validator=_at_least(0.0))
    whole: bool = False
    batch: int = attrs.field(default=100, validator=_at_least(1))
    timeout: float = attrs.field(default=1800.0, validator=_at_least(0.0))
    kernel_timeout: float = attrs.field(default=30.0, validator=_at_least(0.0))
    all: bool = False
    stale: bool = False
    resume: bool = True
    shard: tuple[int, int] = attrs.field(default=(1, 1), validator=_a_part)
    sort: bool = True
    jobs: int = attrs.field(default=0, validator=_at_least(0))
    mp: int = attrs.field(default=0, validator=_at_least(0))
    device: str = ""
    executor: str = attrs.field(default="local", validator=_one_of("local", "ray"))
    ray_address: str = ""
    profile: Path | None = None


@attrs.frozen
class Task:
    """One shape to tune.

    Attributes:
        shape: the shape.
        count: how often the workload ran it.
        incumbent: the solution that its table has now.
        only: where given, these solutions are timed, without a screen, and no others but torch's
            own call.
    """

    shape: Shape
    count: int = 1
    incumbent: Solution | None = None
    only: tuple[Solution, ...] = ()


#: Version of what a time is, for trials to be comparable. 2: on a GPU each call follows a kernel that writes its activations.
MEASURE = "2"
#: Why a chip's clock is held back where it takes all the power that it may.
POWER_CAP = "power cap"


@attrs.frozen
class Samples:
    """Times of one solution, a sample a round.

    Attributes:
        us: microseconds of one call, a value a round.
        calls: calls that one sample spans.
        clock_mhz: SM clock after the rounds, 0 where the driver does not tell.
        throttled: why the driver held the clock back, "" where it did not or does not tell.
    """

    us: tuple[float, ...]
    calls: int = 1
    clock_mhz: int = 0
    throttled: str = ""


#: Where the device is: (launchers by solution, rounds) -> samples by solution; what raised comes back as the exception.
Sampler = Callable[[Mapping[Solution, Launcher], int], dict[Solution, Samples | Exception]]
#: Makes the sampler of one shape: `tunedgemm.tuner.workload.Workload`, or a replay.
Bench = Callable[[Op, Shape, Device], Sampler]
#: For the stages: (solutions, rounds) -> samples by solution; what failed comes back as the Timing that says how.
Sample = Callable[[Sequence[Solution], int], Mapping[Solution, Samples | Timing]]


@attrs.frozen
class Place:
    """Where a lane of the tuner runs: the device, and the node (a host's name, or Ray's node id) that it is in."""

    device: Device
    node: str = ""

    def __str__(self) -> str:
        index = f" {self.device.index}" if self.device.index >= 0 else ""
        return f"{self.device.name or self.device.gfx}{index}" + (f" of {self.node}" if self.node else "")


@attrs.frozen
class Planned:
    """What a run is about to do; told once, from no place, before its first shape.

    Attributes:
        tasks: the shapes to tune.
        skipped: shapes that the table has already, or that are empty.
        places: where it runs.
        output: the table.
    """

    tasks: tuple[Task, ...]
    skipped: tuple[Shape, ...]
    places: tuple[Place, ...]
    output: Path


@attrs.frozen
class Step:
    """What a lane is busy with: for people who wait.

    Attributes:
        task: the shape.
        activity: ``list``, ``compile``, ``check``, ``screen``, ``time``.
        solution: the one at hand, where it is a single one.
        best: the fastest so far, and its microseconds.
        reference_us: microseconds of torch's own call beside it, 0 where they are not known yet.
    """

    task: Task
    activity: str
    solution: Solution | None = None
    best: tuple[Solution, float] | None = None
    reference_us: float = 0.0


@attrs.frozen
class Trials:
    """Timings that are final: they are logged at once, and never done again in this run or by one that resumes it."""

    task: Task
    timings: tuple[Timing, ...]


@attrs.frozen
class Outcome:
    """What tuning one shape gave.

    Attributes:
        task: the shape.
        winner: the timing that goes to the table; None where nothing passed.
        reference: torch's own call, timed beside the others; None where it failed.
        timings: every candidate's.
        tied: solutions that were as fast as the winner within noise.
        seconds: seconds by activity: wall time of compile, check and time, and what the device was
            timed for (``device``).
        libver: version of the winner's library, "" where its kernel names carry a revision.
        place: where it was tuned.
        reason: why nothing could be tried at all.
    """

    task: Task
    winner: Timing | None
    reference: Timing | None
    timings: tuple[Timing, ...] = ()
    tied: int = 0
    seconds: tuple[tuple[str, float], ...] = ()
    libver: str = ""
    place: Place | None = None
    reason: str = ""

    @property
    def gain(self) -> float:
        """Times faster than torch's own call; 0 where either is missing."""
        if self.winner is None or self.reference is None or not self.reference.ok:
            return 0.0
        return self.reference.us / self.winner.us


#: What a run tells: what is planned, then what each lane does while it tunes a shape; a shape's outcome is its last.
Event = Planned | Step | Trials | Outcome


@attrs.frozen
class Report:
    """What a whole run gave.

    Attributes:
        places: where it ran.
        output: the table.
        outcomes: a shape each, in the order in which they were done.
        skipped: shapes that the table had already, or that are empty.
        unbegun: shapes that the budget did not suffice for.
        lost: shapes for which no working device was left.
        pins: with ``--batch-invariant``, the rows with M = 0.
    """

    places: tuple[Place, ...]
    output: Path
    outcomes: tuple[Outcome, ...]
    skipped: tuple[Shape, ...] = ()
    unbegun: tuple[Shape, ...] = ()
    lost: tuple[Shape, ...] = ()
    pins: tuple[Timing, ...] = ()

    @property
    def failed(self) -> Sequence[Outcome]:
        """The shapes for which nothing passed."""
        return [outcome for outcome in self.outcomes if outcome.winner is None]


class DeviceFault(TunedGemmError):
    """The device's context is lost, and with it the process: an illegal address or the like."""


def failed(shape: Shape, solution: Solution, error: Exception) -> Timing:
    """The Timing of a solution that raised."""
    import torch

    status = "failed"
    if isinstance(error, OutOfResources):
        status = "out_of_resources"
    elif isinstance(error, torch.OutOfMemoryError | MemoryError):
        status = "out_of_memory"
    return Timing(shape, solution, status, detail=f"{type(error).__name__}: {error}"[:500])
