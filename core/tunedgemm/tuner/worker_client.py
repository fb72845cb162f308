"""Worker client: requests to the worker of one device, with deadlines, blame and replacement.

A dead worker is replaced before the next request. If it died while timing several solutions, each
is timed alone; an unreproduced crash blames no solution.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.timing import Timing
from tunedgemm.tuner.processes import NeverBegan
from tunedgemm.tuner.roofline import patience_s
from tunedgemm.tuner.trial import CONTENTS, Options, Place, Request, Samples, failed
from tunedgemm.tuner.worker import AnyWorker, WorkerDied

#: Time of a verification in calls: on several operands, repeated, with comparisons.
_CHECK_CALLS = 64
#: Most solutions checked in one request; a request costs 0.5 ms, a check a few.
_BATCH = 16
#: Allowed overhead in seconds of a sample, and of a solution's first use (capture, first launch).
_SAMPLE_S, _FIRST_USE_S = 0.05, 1.0


class DeviceLost(Exception):
    """The device or its node stopped working, so the current shape is unfinished."""


class BudgetSpent(DeviceLost):
    """The time for the current shape is over, so no more requests run."""


@attrs.define(eq=False)
class WorkerClient:
    """Sends requests to the worker of one device.

    Attributes:
        op: the op to tune.
        options: the options, which give the timeouts.
        worker: runs the session.
        deadline: `time.monotonic` at which a request is aborted, and after which none starts.
    """

    op: Op
    options: Options
    worker: AnyWorker
    deadline: float = attrs.field(default=math.inf, init=False)
    place: Place = attrs.field(init=False)
    _is_new: bool = attrs.field(default=True, init=False)

    def begin(self) -> Place:
        """Start the worker, so that a failure of the device blames no solution.

        Raises:
            DeviceLost: the device does not exist, or its worker dies at once.
        """
        try:
            self.place = self.worker(Request("place"), timeout=self.options.timeout)
        except NeverBegan as error:
            raise DeviceLost(f"no worker can be started on it: {error}") from error
        except Exception as error:  # also what a driver raises for a missing device
            raise DeviceLost(f"no worker can be started on it: {type(error).__name__}: {error}") from error
        self._is_new = False
        return self.place

    def stop(self) -> None:
        """End the worker at once."""
        self.worker.stop()

    def ask(self, method: str, *arguments: Any, timeout: float | None = None) -> Any:
        """Call a method of the session and return its answer.

        Args:
            method, arguments: as in `Request`.
            timeout: time limit in seconds, 0 for none; by default that of compiling and binding.

        Raises:
            WorkerDied: the worker died in this request; the next one gets a new worker.
            DeviceLost: no worker can be started on the device.
            BudgetSpent: the deadline has passed.
        """
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise BudgetSpent("the budget is spent")
        if self._is_new:
            self.begin()
        limit = self.options.timeout if timeout is None else timeout
        try:
            return self.worker(Request(method, arguments), timeout=min(limit or left, left) if left < math.inf else limit)
        except WorkerDied as error:
            self._is_new = True
            if time.monotonic() >= self.deadline:
                raise BudgetSpent("the budget ended during a request") from error
            raise

    def open(self, shape: Shape) -> None:
        """Make the operands of a shape; retry once if the worker dies."""
        with contextlib.suppress(WorkerDied):
            self.ask("open", shape)
            return
        self.ask("open", shape)

    def bind(self, shape: Shape, solution: Solution) -> Timing | None:
        """Bind a solution within the time limit of compilations; return a Timing if that fails."""
        try:
            refusal: Timing | None = self.ask("bind", shape, solution)
        except WorkerDied as error:
            status = "compile_timeout" if error.status == "hung" else error.status
            return Timing(shape, solution, status, detail=f"in bind: {error}"[:500])
        except DeviceLost:
            raise
        except Exception as error:  # a plugin may raise anything
            return failed(shape, solution, error)
        return refusal

    def check_all(self, check: str, shape: Shape, solutions: Sequence[Solution], until: float = math.inf) -> Iterator[Timing]:
        """Check solutions in batches; yield the results in order.

        If the worker dies, each solution of the batch is checked alone.

        Args:
            check: name of the session's method.
            shape, solutions: the shape and the solutions.
            until: `time.monotonic` after which no batch but the first starts.
        """
        for start in range(0, len(solutions), _BATCH):
            if start and time.monotonic() >= until:
                return
            batch = solutions[start : start + _BATCH]
            try:
                refusals = self.ask("each", [Request("bind", (shape, solution)) for solution in batch])
                bound = [Request(check, (shape, solution)) for solution, refusal in zip(batch, refusals, strict=True) if refusal is None]
                answers = iter(self.ask("each", bound, timeout=self.allowance(shape, _CHECK_CALLS, len(bound))) if bound else ())
                checked = [refusal or next(answers) for refusal in refusals]
            except DeviceLost:
                raise
            except Exception:  # it does not name the solution
                checked = [self.check(check, shape, solution) for solution in batch]
            yield from filter(None, checked)

    def check(self, check: str, shape: Shape, solution: Solution) -> Timing:
        """Bind and verify a solution by a method of the session, within the kernel timeout."""
        timing: Timing = self._alone(shape, solution, _CHECK_CALLS, check, solution)
        return timing

    def bits(self, shape: Shape, solution: Solution, sizes: Sequence[int]) -> Timing:
        """Measure the bits of a solution at several M; bind it within the time limit of compilations."""
        calls, largest = CONTENTS + 2 * len(sizes), shape.with_m(max(sizes))

        def bits() -> Any:
            self.ask("bind_all", shape, solution, sizes)
            return self.ask("bits", shape, solution, sizes, timeout=self.allowance(largest, calls))

        timing: Timing = _answer_or_failure(shape, solution, bits)
        return timing

    def _alone(self, shape: Shape, solution: Solution, calls: int, method: str, *arguments: Any) -> Any:
        """Bind a solution and return the session's answer about it, or the Timing of its failure."""

        def bound() -> Any:
            return self.bind(shape, solution) or self.ask(method, shape, *arguments, timeout=self.allowance(shape, calls))

        return _answer_or_failure(shape, solution, bound)

    def sample(self, shape: Shape, solutions: Sequence[Solution], rounds: int) -> Mapping[Solution, Samples | Timing]:
        """Time solutions in interleaved rounds; return a Timing for each that fails."""
        try:
            limit = self.allowance(shape, rounds, len(solutions))
            samples: Mapping[Solution, Samples | Timing] = self.ask("sample", shape, tuple(solutions), rounds, timeout=limit)
        except DeviceLost:
            raise
        except Exception:  # it does not name the solution
            return self._sample_one_by_one(shape, solutions, rounds)
        return samples

    def _sample_one_by_one(self, shape: Shape, solutions: Sequence[Solution], rounds: int) -> dict[Solution, Samples | Timing]:
        """Take the same rounds with one request per sample, so that a crash blames one solution."""
        samples: dict[Solution, Samples] = {}
        lost: dict[Solution, Timing] = {}
        for _ in range(rounds):
            alive = [solution for solution in solutions if solution not in lost]
            for solution in random.sample(alive, len(alive)):
                answer = self._alone(shape, solution, 4, "sample", (solution,), 1)
                answer = answer if isinstance(answer, Timing) else answer[solution]
                if isinstance(answer, Timing):
                    lost[solution] = answer
                else:
                    earlier = samples.get(solution)
                    samples[solution] = attrs.evolve(answer, us=(earlier.us if earlier else ()) + answer.us)
        return {**{solution: answer for solution, answer in samples.items() if solution not in lost}, **lost}

    def allowance(self, shape: Shape, samples: int, solutions: int = 1) -> float:
        """Return the timeout in seconds for a number of samples; 0 for none."""
        kernel_timeout = self.options.kernel_timeout
        slow = _SAMPLE_S + patience_s(self.op, shape, self.place.device)
        return kernel_timeout + solutions * (_FIRST_USE_S + samples * slow) if kernel_timeout else 0.0


def _answer_or_failure(shape: Shape, solution: Solution, ask: Callable[[], Any]) -> Any:
    """Return the answer to requests about one solution, or the Timing of its failure.

    Raises:
        DeviceLost: the device is lost.
    """
    try:
        return ask()
    except DeviceLost:
        raise
    except WorkerDied as error:
        return Timing(shape, solution, error.status, detail=str(error)[:500])
    except Exception as error:  # a plugin may raise anything
        return failed(shape, solution, error)
