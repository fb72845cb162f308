"""Device tuner: tunes shapes on one device through the stages of `shape_run`."""

from __future__ import annotations

from collections.abc import Sequence

from tunedgemm.solution import Solution
from tunedgemm.timing import OTHER_BITS, Timing
from tunedgemm.tuner.classes import serves_any_m
from tunedgemm.tuner.open_device import OpenDevice
from tunedgemm.tuner.shape_run import Emit, ShapeRun
from tunedgemm.tuner.trial import Outcome, Step, Task, Trials

#: Grace period after the deadline to verify the winner: fraction of the budget, and least seconds.
GRACE, LEAST_GRACE_S = 0.1, 1.0


class DeviceTuner(OpenDevice):
    """Tunes shapes on one device."""

    def tune(self, task: Task, earlier: Sequence[Timing], emit: Emit, deadline: float = float("inf")) -> None:
        """Run all stages of one shape; the last event is its outcome.

        Args:
            task: the shape.
            earlier: final timings of earlier runs, which are not repeated.
            emit: receives each event.
            deadline: `time.monotonic` at which the stages should end; they try fewer solutions to
                meet it. The worker gets the grace period on top.

        Raises:
            DeviceLost: the device stopped working.
            BudgetSpent: the shape was not finished by then. Only the first shape of a run is stored
                from fewer solutions, since a row is final.
        """
        self.client.deadline = deadline + max(LEAST_GRACE_S, GRACE * self.options.budget)
        if task.check:
            self._check(task, earlier, emit)
        else:
            ShapeRun(self, task, emit, deadline).run(earlier)
            self.finished += 1
        self.forget(task.shape)

    def _check(self, task: Task, earlier: Sequence[Timing], emit: Emit) -> None:
        """Check the task's solutions without timing; the outcome has their timings."""
        known = {timing.solution: timing for timing in earlier if not timing.us and not _is_given_up(timing)}
        left = [solution for solution in task.only if solution not in known]
        for m in task.sizes:
            self.compilers.begin(task.shape.with_m(m), left, self.place.device)
        for solution in left:
            emit(Step(task, "check", solution))
            for m in task.sizes:
                self.compilers.finish(task.shape.with_m(m), [solution], self.place.device)  # `bind` repeats a failure
            if task.sizes:
                known[solution] = self._bits(task, solution, emit)
            else:
                known[solution] = self.client.check(task.check, task.shape, solution)
        last = max((place for place, solution in enumerate(left) if serves_any_m(known[solution])), default=0)
        for solution in left[:last]:
            if _is_given_up(known[solution]):  # a later kernel may have its bits, and serve every M
                known[solution] = self._bits(task, solution, emit)
        for m in task.sizes:
            self.compilers.drop(task.shape.with_m(m), self.place.device)
        emit(Outcome(task, None, None, tuple(known.values()), place=self.place))

    def _bits(self, task: Task, solution: Solution, emit: Emit) -> Timing:
        timing = self.client.bits(task.shape, solution, task.sizes)
        emit(Trials(task, (timing,)))
        return timing


def _is_given_up(timing: Timing) -> bool:
    """Check whether bits were left unmeasured because no kernel for every M had them so far."""
    return timing.detail.startswith(OTHER_BITS)
