"""Asks a worker about the production op, shape by shape: what it runs, whether that is right, how long it takes."""

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
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.timing import Timing
from tunedgemm.tuner.executors.local import devices
from tunedgemm.tuner.measure import median_and_noise
from tunedgemm.tuner.remote import Remote
from tunedgemm.tuner.select import TIE
from tunedgemm.tuner.trial import Bench, Options, Place, Samples
from tunedgemm.tuner.worker import Died, Inline, Worker

#: AITER's head room over the error ratio that a row was tuned with.
HEAD_ROOM = 0.05
#: Fewest rounds, whatever the time they take.
FEWEST_ROUNDS = 15
#: Rounds that one call of the worker takes: its deadline is that of so many.
BLOCK = 8
#: Calls of a verification: on several operands, and repeated; the references are about as slow.
_CHECKS = 24


@attrs.define(eq=False)
class Measuring:
    """The production op over some sides, in a worker that is replaced when it dies.

    Attributes:
        sides: the tables to dispatch through.
        options: of a tuning run; those about accuracy, cache, timing, rounds and deadlines hold
            here.
        remote: the device's session.
        table_only: whether what no row serves counts as an error.
    """

    sides: tuple[Side, ...]
    options: Options
    remote: Remote
    table_only: bool = False

    @property
    def place(self) -> Place:
        """Where the device is; known once the worker has begun."""
        return self.remote.place

    def begin(self) -> Place:
        """Start the worker and learn where it is."""
        return self.remote.begin()

    def served(self, shape: Shape) -> Served:
        """Check the one side on a shape, and time it where it is right."""
        served = self.checked(shape, self.sides[0])
        return self._timed(served, self.sides[0]) if served.ok else served

    def change(self, shape: Shape, count: int) -> Change:
        """Check the two sides on a shape; time them in the same rounds where both are right."""
        before, after = (self.checked(shape, side) for side in self.sides)
        change = Change(before, after, count=count)
        if before.ok and after.ok and before.solution == after.solution:
            timed = self._timed(before, self.sides[0])
            return attrs.evolve(change, before=timed, after=attrs.evolve(timed, origin=after.origin, why=after.why) if timed.ok else timed)
        if before.ok and after.ok:
            samples = self._samples(shape, self.sides)
            if not isinstance(samples, str) and all(isinstance(found, Samples) for found in samples):
                return self._paired(change, *(found for found in samples if isinstance(found, Samples)))
        before = self._timed(before, self.sides[0]) if before.ok else before
        after = self._timed(after, self.sides[1]) if after.ok else after
        ratio = after.us / before.us if before.us and after.us else 0.0
        return attrs.evolve(change, before=before, after=after, ratio=ratio, noise=max(SEQUENTIAL, math.hypot(before.noise, after.noise)))

    def checked(self, shape: Shape, side: Side) -> Served:
        """Bind and verify the op on a shape, in its own call of the worker, so that a death blames this one."""
        try:
            self.remote.ask("open", shape)
            refusal: Timing | None = self.remote.ask("bind", shape, side.solution)
            timing = refusal or self.remote.ask("check", shape, side.solution, timeout=self.remote.allowance(shape, _CHECKS))
            choice = self.remote.ask("choice", shape, side.name)
        except Died as error:
            return Served(shape, status=_line(f"error:{error.status}: {error}"))
        except Exception as error:  # a kernel may raise anything
            return Served(shape, status=_line(f"error:{type(error).__name__}: {error}"))
        return self._judged(timing, choice)

    def _judged(self, timing: Timing, choice: Choice) -> Served:
        offer = choice.first.offer
        served = Served(
            timing.shape, offer.solution, "ok", err_ratio=timing.err_ratio, origin=offer.origin, why=offer.why, match=offer.match
        )
        allowed = max(self.options.errRatio, choice.err_ratio + HEAD_ROOM if choice.first.tuned else 0.0)
        status, detail = "ok", timing.detail
        if timing.status == "wrong" or (timing.status == "ok" and timing.err_ratio > allowed):
            status, detail = f"mismatch:err_ratio={timing.err_ratio:.4f}", detail or f"allowed {allowed:.2%}"
        elif timing.status != "ok":
            status = f"error:{timing.status}: {timing.detail}"
        elif choice.failure:
            status, detail = f"error:{choice.failure}", f"served by {choice.now.offer.solution} instead"
        elif self.table_only and not choice.first.tuned:
            passed = "; ".join(f"{offer.solution}: {reason}" for offer, reason in choice.first.passed_over if offer.origin == "table")
            status = f"error:no row serves it: {passed or 'a row of its shape is not looked up for it'}"
        return attrs.evolve(served, status=_line(status), detail=detail)

    def _timed(self, served: Served, side: Side) -> Served:
        """Time one side alone."""
        samples = self._samples(served.shape, [side])
        answer = samples if isinstance(samples, str) else samples[0]
        if not isinstance(answer, Samples):
            reason = answer if isinstance(answer, str) else f"{answer.status}: {answer.detail}"
            return attrs.evolve(served, status=_line(f"error:{reason}"), detail="while it was timed")
        return _with_times(served, answer)

    def _paired(self, change: Change, before: Samples, after: Samples) -> Change:
        """Both sides' medians, and the ratio by rounds: what drifts from round to round is in both and goes out."""
        ratio, noise = median_and_noise(tuple(later / earlier for earlier, later in zip(before.us, after.us, strict=True)))
        both = _with_times(change.before, before), _with_times(change.after, after)
        return attrs.evolve(change, before=both[0], after=both[1], ratio=ratio, noise=max(TIE, noise))

    def _samples(self, shape: Shape, sides: Sequence[Side]) -> list[Samples | Timing] | str:
        """A side's samples each, from the same rounds; where the worker died or raised, the reason."""
        solutions = tuple(side.solution for side in sides)
        options, rounds = self.options, max(self.options.warmup, 1)
        try:
            rough = self._sampled(shape, solutions, rounds)
            cost = sum(sum(found.us) * found.calls for found in rough if isinstance(found, Samples)) * 1e-6 / rounds
            affordable = int(options.seconds / max(cost, 1e-9))
            left = min(options.iters, max(affordable, FEWEST_ROUNDS))
            found: list[Samples | Timing] = []
            while left > 0:
                found = _joined(found, self._sampled(shape, solutions, min(BLOCK, left)))
                left -= BLOCK
            failures = [self._after(shape, side) for side in sides]
        except Died as error:
            return f"{error.status}: {error}"
        except Exception as error:  # a kernel may raise anything
            return f"{type(error).__name__}: {error}"
        return [
            Timing(shape, side.solution, "failed", detail=failure) if failure else sample
            for side, sample, failure in zip(sides, found, failures, strict=True)
        ]

    def _after(self, shape: Shape, side: Side) -> str:
        """What went wrong while a side was timed: it fell back to another solution, or is not right any more; else ""."""
        again: Timing = self.remote.ask("check_again", shape, side.solution, timeout=self.remote.allowance(shape, _CHECKS))
        choice: Choice = self.remote.ask("choice", shape, side.name)
        return choice.failure or ("" if again.status == "ok" else again.detail)

    def _sampled(self, shape: Shape, solutions: tuple[Solution, ...], rounds: int) -> list[Samples | Timing]:
        answers = self.remote.ask("sample", shape, solutions, rounds, timeout=self.remote.allowance(shape, rounds, len(solutions)))
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
    """A `Measuring` whose worker ends with the context.

    Args:
        registry: where given, everything runs in this process, over these backends.
        bench: where times come from; it must be importable in a child where *registry* is not
            given.

    Raises:
        UserError: there is no such device.
    """
    # What differs from row to row is judged on this side; in the worker only what is wrong whatever
    # the ratio is.
    make = functools.partial(Production, op_name, devices(options)[0], attrs.evolve(options, errRatio=1.0), bench=bench, sides=tuple(sides))
    worker = Worker(make) if registry is None else Inline(functools.partial(make, installed=registry))
    try:
        yield Measuring(tuple(sides), options, Remote(op_named(op_name), options, worker), table_only)
    finally:
        worker.stop()


def _joined(earlier: Sequence[Samples | Timing], later: list[Samples | Timing]) -> list[Samples | Timing]:
    """Samples of two blocks as one; what failed in either has failed."""
    if not earlier:
        return later
    joined: list[Samples | Timing] = []
    for one, two in zip(earlier, later, strict=True):
        if isinstance(one, Samples) and isinstance(two, Samples):
            joined.append(attrs.evolve(one, us=one.us + two.us))
        else:
            joined.append(one if isinstance(one, Timing) else two)
    return joined


def _with_times(served: Served, samples: Samples) -> Served:
    median, noise = median_and_noise(samples.us)
    return attrs.evolve(served, us=median, noise=noise, samples=len(samples.us))


def _line(text: str) -> str:
    return " ".join(text.split())[:300]
