"""Verify and time dispatched calls in a worker, shape by shape."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence

import attrs

from tunedgemm.analysis.compare.production import Choice, Production, Side
from tunedgemm.analysis.compare.verdict import SEQUENTIAL, Change, Served
from tunedgemm.backends.registry import Registry
from tunedgemm.ops import op_named
from tunedgemm.ops.accuracy import with_flags
from tunedgemm.ops.both_sides import judged_as
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.timing import Timing
from tunedgemm.tuner.executors.local import devices
from tunedgemm.tuner.measure import median_and_noise
from tunedgemm.tuner.select import TIE
from tunedgemm.tuner.trial import Bench, Options, Place, Samples
from tunedgemm.tuner.worker import Inline, Worker, WorkerDied
from tunedgemm.tuner.worker_client import WorkerClient

#: AITER's allowance over the error ratio at which a row was tuned.
HEAD_ROOM = 0.05
#: Fewest rounds, regardless of time.
FEWEST_ROUNDS = 15
#: Rounds per request to the worker, which determine its timeout.
BLOCK = 8
#: Time of a verification in calls: several operands, repeated, and references.
_CHECKS = 24


@attrs.define(eq=False)
class Measuring:
    """Dispatch over several sides, in a worker that is replaced when it dies.

    Attributes:
        sides: the tables to dispatch through.
        options: of a tuning run; only accuracy, cache, timing, rounds and deadlines count.
        client: sends requests to the device's worker.
        table_only: whether a shape without a row is an error.
    """

    sides: tuple[Side, ...]
    options: Options
    client: WorkerClient
    table_only: bool = False

    @property
    def place(self) -> Place:
        """Return the device's place, known after `begin`."""
        return self.client.place

    def begin(self) -> Place:
        """Start the worker; return the device's place."""
        return self.client.begin()

    def served(self, shape: Shape) -> Served:
        """Verify the only side on a shape, and time it if it passes."""
        served = self.checked(shape, self.sides[0])
        return self._time_alone(served, self.sides[0]) if served.ok else served

    def change(self, shape: Shape, count: int) -> Change:
        """Verify both sides on a shape, and compare their times if both pass."""
        before, after = (self.checked(shape, side) for side in self.sides)
        change = Change(before, after, count=count)
        if before.ok and after.ok and before.solution == after.solution:
            timed = self._time_alone(before, self.sides[0])
            same = attrs.evolve(timed, origin=after.origin, why=after.why, match=after.match) if timed.ok else timed
            return attrs.evolve(change, before=timed, after=same)
        if before.ok and after.ok:
            samples = self.samples(shape, self.sides)
            if not isinstance(samples, str) and all(isinstance(sample, Samples) for sample in samples):
                return self._time_paired(change, *(sample for sample in samples if isinstance(sample, Samples)))
        before = self._time_alone(before, self.sides[0]) if before.ok else before
        after = self._time_alone(after, self.sides[1]) if after.ok else after
        ratio = after.us / before.us if before.us and after.us else 0.0
        return attrs.evolve(change, before=before, after=after, ratio=ratio, noise=max(SEQUENTIAL, math.hypot(before.noise, after.noise)))

    def checked(self, shape: Shape, side: Side) -> Served:
        """Bind and verify the op on a shape, in a separate request, so that a crash blames it."""
        try:
            self.client.ask("open", shape)
            refusal = self.client.ask("bind", shape, side.solution)
            timing = refusal or self.client.ask("check", shape, side.solution, timeout=self.client.allowance(shape, _CHECKS))
            choice = self.client.ask("choice", shape, side.name)
        except WorkerDied as error:
            return Served(shape, status=_line(f"error:{error.status}: {error}"))
        except Exception as error:  # a kernel may raise anything
            return Served(shape, status=_line(f"error:{type(error).__name__}: {error}"))
        return self._judge(timing, choice)

    def samples(self, shape: Shape, sides: Sequence[Side]) -> list[Samples | Timing] | str:
        """Return each side's samples from common rounds, or why the worker died or raised."""
        solutions = tuple(side.solution for side in sides)
        options, rounds = self.options, max(self.options.warmup, 1)
        try:
            rough = self._sample(shape, solutions, rounds)
            cost = sum(sum(sample.us) * sample.calls for sample in rough if isinstance(sample, Samples)) * 1e-6 / rounds
            affordable = int(options.seconds / max(cost, 1e-9))
            left = min(options.iters, max(affordable, FEWEST_ROUNDS))
            samples: list[Samples | Timing] = []
            while left > 0:
                samples = _join_samples(samples, self._sample(shape, solutions, min(BLOCK, left)))
                left -= BLOCK
            failures = [self._fault_after_timing(shape, side) for side in sides]
        except WorkerDied as error:
            return f"{error.status}: {error}"
        except Exception as error:  # a kernel may raise anything
            return f"{type(error).__name__}: {error}"
        return [
            Timing(shape, side.solution, "failed", detail=failure) if failure else sample
            for side, sample, failure in zip(sides, samples, failures, strict=True)
        ]

    def _judge(self, timing: Timing, choice: Choice) -> Served:
        offer = choice.first.offer
        served = Served(
            timing.shape, offer.solution, "ok", err_ratio=timing.err_ratio, origin=offer.origin, why=offer.why, match=offer.match
        )
        options, tuned_with = self.options, choice.err_ratio if choice.first.tuned else 0.0
        allowed = max(options.errRatio, tuned_with + HEAD_ROOM if choice.first.tuned else 0.0)
        own = self.client.op.tolerance(timing.shape)
        row = with_flags(own, options.atol, options.rtol, max(options.errRatio, tuned_with)).row_error
        status, detail = "ok", timing.detail
        exceeds = timing.err_ratio > allowed or not timing.row_error <= row
        is_own = judged_as(self.client.op, offer.solution) is self.client.op  # else the verifier has judged it
        if timing.status == "wrong" or (timing.status == "ok" and is_own and exceeds):
            status = f"mismatch:err_ratio={timing.err_ratio:.4f}"
            detail = detail or f"allowed {allowed:.2%}; worst row {timing.row_error:.1e}, of at most {row:.1e}"
        elif timing.status != "ok":
            status = f"error:{timing.status}: {timing.detail}"
        elif choice.failure:
            status, detail = f"error:{choice.failure}", f"served by {choice.now.offer.solution} instead"
        elif self.table_only and not choice.first.tuned:
            passed = "; ".join(f"{offer.solution}: {reason}" for offer, reason in choice.first.passed_over if offer.origin == "table")
            status = f"error:no row serves it: {passed or 'no look-up reaches a row of its shape'}"
        return attrs.evolve(served, status=_line(status), detail=detail)

    def _time_alone(self, served: Served, side: Side) -> Served:
        samples = self.samples(served.shape, [side])
        answer = samples if isinstance(samples, str) else samples[0]
        if not isinstance(answer, Samples):
            reason = answer if isinstance(answer, str) else f"{answer.status}: {answer.detail}"
            return attrs.evolve(served, status=_line(f"error:{reason}"), detail="while it was timed")
        return _with_times(served, answer)

    def _time_paired(self, change: Change, before: Samples, after: Samples) -> Change:
        """Add both medians and the paired ratio, in which drift cancels out."""
        ratio, noise = median_and_noise(tuple(later / earlier for earlier, later in zip(before.us, after.us, strict=True)))
        both = _with_times(change.before, before), _with_times(change.after, after)
        return attrs.evolve(change, before=both[0], after=both[1], ratio=ratio, noise=max(TIE, noise))

    def _fault_after_timing(self, shape: Shape, side: Side) -> str:
        """Return a fault after timing (another solution served, wrong output), or ""."""
        again = self.client.ask("check_again", shape, side.solution, timeout=self.client.allowance(shape, _CHECKS))
        choice: Choice = self.client.ask("choice", shape, side.name)
        return choice.failure or ("" if again.status == "ok" else again.detail)

    def _sample(self, shape: Shape, solutions: tuple[Solution, ...], rounds: int) -> list[Samples | Timing]:
        answers = self.client.ask("sample", shape, solutions, rounds, timeout=self.client.allowance(shape, rounds, len(solutions)))
        return [answers[solution] for solution in solutions]


@contextlib.contextmanager
def measuring(
    op_name: str,
    sides: Sequence[Side],
    options: Options,
    *,
    table_only: bool = False,
    registry: Registry | None = None,
    bench: Bench | None = None,
) -> Iterator[Measuring]:
    """Yield a `Measuring` whose worker ends with the block.

    Args:
        registry: backends to run in this process; None runs the installed ones in a child.
        bench: the source of times; a child must be able to import it.

    Raises:
        UserError: the device does not exist.
    """
    # The allowed error differs by row of the table, so it is checked here; the worker allows any.
    any_ratio, device = attrs.evolve(options, errRatio=1.0), devices(options)[0]
    make = functools.partial(Production, op_name, device, any_ratio, bench=bench, sides=tuple(sides), err_ratio=options.errRatio)
    worker = Worker(make) if registry is None else Inline(functools.partial(make, installed=registry))
    try:
        yield Measuring(tuple(sides), options, WorkerClient(op_named(op_name), options, worker), table_only)
    finally:
        worker.stop()


def _join_samples(earlier: Sequence[Samples | Timing], later: list[Samples | Timing]) -> list[Samples | Timing]:
    """Join the samples of two blocks; a failure in either is a failure."""
    if not earlier:
        return later
    joined: list[Samples | Timing] = []
    for first, second in zip(earlier, later, strict=True):
        if isinstance(first, Samples) and isinstance(second, Samples):
            joined.append(attrs.evolve(first, us=first.us + second.us))
        else:
            joined.append(first if isinstance(first, Timing) else second)
    return joined


def _with_times(served: Served, samples: Samples) -> Served:
    median, noise = median_and_noise(samples.us)
    return attrs.evolve(served, us=median, noise=noise, samples=len(samples.us))


def _line(text: str) -> str:
    return " ".join(text.split())[:300]
