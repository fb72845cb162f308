"""Values that the stages of the tuner exchange: options, tasks, samples, events, outcomes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from tunedgemm.backends.launcher import Launcher
from tunedgemm.device import Device
from tunedgemm.errors import OutOfResources, TunedGemmError, UserError
from tunedgemm.ops.accuracy import MAX_ERROR_RATIO
from tunedgemm.ops.op import Op
from tunedgemm.process.memory import is_out_of_memory
from tunedgemm.process.plugin_guard import described
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Problem
from tunedgemm.timing import Timing

#: Most compiler processes.
_MOST_JOBS = 1024


def _at_least(least: float, most: float = math.inf) -> Callable[[object, attrs.Attribute, Any], None]:
    def check(_: object, attribute: attrs.Attribute, value: Any) -> None:
        if not value >= least:
            raise UserError(f"--{attribute.name} must be at least {least:g} (got {value})")
        if value > most:
            raise UserError(f"--{attribute.name} must be at most {most:g} (got {value})")

    return check


def _a_share(_: object, attribute: attrs.Attribute, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise UserError(f"--{attribute.name} must be a share of the elements, 0 to 1 (got {value})")


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
    """How to tune; the CLI has flags of the same names.

    Attributes:
        libtype: ``all`` or comma-separated libtypes, whose order also decides ties.
        errRatio: largest fraction of elements outside the tolerance.
        atol, rtol: element bounds, ``|out - ref| <= atol + rtol * |ref|``; None for the op's.
        deterministic: only solutions with bitwise equal results in repeated runs.
        batch_invariant: only solutions of one bit class for each (N, K): their rows are bitwise
            equal for any M. One serves any M, with M = 0.
        cache: ``cold`` rotates through copies of the weights, ``hot`` uses one copy.
        timing: ``graph`` replays captured calls, ``eager`` launches them.
        warmup: uncounted rounds before timing.
        iters: most rounds of the accurate phase.
        candidates: most solutions per libtype, its best guesses and their neighbours; below 5 the
            guesses alone; 0 for all.
        search: ``quick`` tries the beginning of lists whose order was measured, ``full`` whole
            lists and more neighbours.
        topk: solutions per libtype that reach the accurate phase.
        seconds: device seconds of the accurate phase per shape.
        budget: wall time of the run in seconds, spent on the largest call count x expected saving
            first; 0 for no limit.
        whole: finish all M of one (N, K) before the next.
        batch: number of shapes whose kernels compile ahead of the timed one.
        timeout: time limit in seconds of one compilation or bind; 0 for none.
        kernel_timeout: seconds after which the calls of one solution count as hung; 0 for no limit.
        all: also tune shapes that the output table already has.
        stale: tune only rows of the output table whose library version has changed.
        resume: reuse the trials of interrupted runs with equal options and versions.
        shard: (i, n): tune only the i-th of n parts of the shapes.
        sort: sort the output by its key, N before M.
        jobs: compiler processes; 0 for one per core.
        mp: number of devices of this machine to tune on; 0 for all GPUs, or the CPU.
        device: devices of this machine: comma-separated GPU indices, or ``cpu``; "" for all GPUs,
            or the CPU.
        executor: ``local``, or ``ray`` for every GPU of a Ray cluster, or the CPU of each node
            without GPUs.
        ray_address: address of the cluster; "" for the one that Ray finds or starts.
        profile: CSV file for every candidate's result; None for no such file.
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
    search: str = attrs.field(default="quick", validator=_one_of("quick", "full"))
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
    jobs: int = attrs.field(default=0, validator=_at_least(0, _MOST_JOBS))
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
        count: its calls in the workload.
        incumbent: the table's current solution.
        guess: what serves where no row does; None for torch, and without a budget.
        only: if given, time only these solutions and the baseline, without a screen.
        check: if given, call only this method of the session for each of *only*, without timing.
        sizes: M at which the method ``bits`` runs them, for a shape with M = 0.
        saving: expected saving of tuning over all calls, in microseconds; 0 without a budget.
    """

    shape: Shape
    count: int = 1
    incumbent: Solution | None = None
    guess: Solution | None = attrs.field(default=None, eq=False)
    only: tuple[Solution, ...] = ()
    check: str = ""
    sizes: tuple[int, ...] = ()
    saving: float = attrs.field(default=0.0, eq=False)

    @property
    def holder(self) -> Solution | None:
        """Return what serves now, which a winner has to beat."""
        return self.incumbent or self.guess


#: Version of the measurement method; trials of other versions are not comparable. In 2, each call
#: on a GPU follows a kernel that writes its activations.
MEASURE = "2"
#: The throttling reason of a chip at its power limit.
POWER_CAP = "power cap"

#: M at which bits are compared: around the edges of tiles, and ragged ones.
SIZES = (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 256, 512, 1000, 4096)
#: Different rows of x; row i has content i modulo this prime, so each content meets many places in
#: a tile. They are many, because two kernels that round one float32 operation in another way differ
#: in one of 100,000 outputs of 16 bits.
CONTENTS = 257


@attrs.frozen
class Samples:
    """Samples of one solution, one per round.

    Attributes:
        us: microseconds per call, by round.
        calls: calls per sample.
        clock_mhz: SM clock after the rounds; 0 if unknown.
        throttled: throttling reason; "" if there was none or it is unknown.
    """

    us: tuple[float, ...]
    calls: int = 1
    clock_mhz: int = 0
    throttled: str = ""


#: Times launchers in the device's process: (launchers by solution, rounds) -> samples or the
#: exception, by solution.
Sampler = Callable[[Mapping[Solution, Launcher], int], dict[Solution, Samples | Exception]]
#: Makes the sampler of one shape: `tunedgemm.tuner.rounds.Workload`, or a replay.
Bench = Callable[[Op, Shape, Device], Sampler]
#: Times solutions for the stages: (solutions, rounds) -> samples or the Timing of a failure.
Sample = Callable[[Sequence[Solution], int], Mapping[Solution, Samples | Timing]]


@attrs.frozen
class Place:
    """A device and its node, which is a host name or Ray's node id."""

    device: Device
    node: str = ""

    def __str__(self) -> str:
        index = f" {self.device.index}" if self.device.index >= 0 else ""
        return f"{self.device.name or self.device.gfx}{index}" + (f" of {self.node}" if self.node else "")


@attrs.frozen
class Planned:
    """Event: the plan of a run, emitted once, without a place, before the first shape.

    Attributes:
        tasks: the shapes to tune.
        skipped: shapes that are empty or already in the table.
        places: the devices of the run.
        output: the table.
    """

    tasks: tuple[Task, ...]
    skipped: tuple[Shape, ...]
    places: tuple[Place, ...]
    output: Path


@attrs.frozen
class Step:
    """Event: the current activity of a device tuner, for the display.

    Attributes:
        task: the shape.
        activity: ``list``, ``compile``, ``check``, ``screen``, ``time``.
        solution: the current solution, if there is a single one.
        best: the fastest solution so far, and its microseconds.
        baseline_us: microseconds of the baseline; 0 while unknown.
    """

    task: Task
    activity: str
    solution: Solution | None = None
    best: tuple[Solution, float] | None = None
    baseline_us: float = 0.0


@attrs.frozen
class Trials:
    """Event: final timings, which are logged at once and not repeated after a resume."""

    task: Task
    timings: tuple[Timing, ...]


@attrs.frozen
class Outcome:
    """Event: the result of tuning one shape.

    Attributes:
        task: the shape.
        winner: the timing for the table; None if no solution passed.
        baseline: the timing of torch's call; None if it failed.
        timings: the timings of all candidates.
        tied: number of solutions that tied with the winner.
        seconds: wall time of activities ``list``, ``open``, ``compile``, ``check`` and ``time``,
            and device time ``device``, in seconds.
        libver: version of the winner's library; "" if its kernel names contain a revision.
        place: the device that tuned it.
        reason: why no solution could be tried.
        refusals: (libtype, reason) of backends for such devices that offered no solution.
    """

    task: Task
    winner: Timing | None
    baseline: Timing | None
    timings: tuple[Timing, ...] = ()
    tied: int = 0
    seconds: tuple[tuple[str, float], ...] = ()
    libver: str = ""
    place: Place | None = None
    reason: str = ""
    refusals: tuple[tuple[str, str], ...] = ()

    @property
    def gain(self) -> float:
        """Return the winner's speed-up over the baseline; 0 if either is missing."""
        if self.winner is None or self.baseline is None or not self.baseline.ok:
            return 0.0
        return self.baseline.us / self.winner.us


@attrs.frozen
class ClassCost:
    """A bit class of one (N, K), and what it costs.

    Attributes:
        label: the hash of its bits.
        kernels: number of its kernels.
        libtypes: their libtypes.
        cost: time of all calls, relative to the fastest of all kernels at each M; 0 if no kernel
            serves every M.
    """

    label: str
    kernels: int
    libtypes: tuple[str, ...]
    cost: float = 0.0


@attrs.frozen
class ChosenClass:
    """The bit class of one (N, K).

    Attributes:
        shape: the shape with M = 0.
        classes: the classes found, the chosen one first.
        rows: the rows by M, and the one for any M.
        reason: why no class was chosen; "" if one was.
    """

    shape: Shape
    classes: tuple[ClassCost, ...]
    rows: tuple[Timing, ...] = ()
    reason: str = ""


#: Events of a run: first its plan, then those of the device tuners; each shape ends with its
#: outcome.
Event = Planned | Step | Trials | Outcome


@attrs.frozen
class Report:
    """Result of a run.

    Attributes:
        places: the devices.
        output: the table.
        outcomes: the outcome of each shape, in order of completion.
        skipped: shapes that are empty or already in the table.
        unbegun: shapes beyond the budget.
        lost: shapes left when no device worked.
        classes: with ``--batch-invariant``, the bit class of each (N, K).
        elsewhere: with ``--all``, shapes whose lines name another device.
        left_out: invalid lines of the input.
    """

    places: tuple[Place, ...]
    output: Path
    outcomes: tuple[Outcome, ...]
    skipped: tuple[Shape, ...] = ()
    unbegun: tuple[Shape, ...] = ()
    lost: tuple[Shape, ...] = ()
    classes: tuple[ChosenClass, ...] = ()
    elsewhere: tuple[Shape, ...] = ()
    left_out: tuple[Problem, ...] = ()

    @property
    def failed(self) -> Sequence[Outcome]:
        """Return the outcomes without a winner."""
        return [outcome for outcome in self.outcomes if outcome.winner is None]


@attrs.frozen
class Request:
    """A call of a session's method, sent to the worker.

    Attributes:
        method: name of a method of `tunedgemm.tuner.session.Session`.
        arguments: its arguments, which begin with shape and solution if it is about one solution.
    """

    method: str
    arguments: tuple[Any, ...] = ()

    def run(self, session: Any) -> Any:
        """Call the session and return its answer."""
        return getattr(session, self.method)(*self.arguments)


class DeviceFault(TunedGemmError):
    """The device's context is broken, for example by an illegal address; its process must end."""


class WrongOutput(TunedGemmError):
    """A wrong output of timed calls."""


def failed(shape: Shape, solution: Solution, error: Exception) -> Timing:
    """Return the Timing of a solution that raised."""
    status = "failed"
    if isinstance(error, WrongOutput):
        return Timing(shape, solution, "wrong", err_ratio=1.0, detail=str(error)[:500])
    if isinstance(error, OutOfResources):
        status = "out_of_resources"
    elif is_out_of_memory(error):
        status = "out_of_memory"
    return Timing(shape, solution, status, detail=described(error)[:500])
