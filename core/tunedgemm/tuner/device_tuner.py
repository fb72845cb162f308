"""Device tuner: tunes shapes on one device through the stages of `shape_run`."""

from __future__ import annotations

from collections.abc import Sequence

from tunedgemm.timing import Timing
from tunedgemm.tuner.open_device import OpenDevice
from tunedgemm.tuner.shape_run import Emit, ShapeRun
from tunedgemm.tuner.trial import Task

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
        ShapeRun(self, task, emit, deadline).run(earlier)
        self.finished += 1
        self.forget(task.shape)
