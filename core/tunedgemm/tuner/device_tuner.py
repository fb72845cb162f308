"""Device tuner: one device, on which `shape_run` takes shapes through the stages."""

from __future__ import annotations

from collections.abc import Sequence

from tunedgemm.timing import Timing
from tunedgemm.tuner.open_device import OpenDevice
from tunedgemm.tuner.shape_run import Emit, ShapeRun
from tunedgemm.tuner.trial import Task

#: Time beyond the deadline in which the winner is verified: a share of the budget, and least
#: seconds.
GRACE, LEAST_GRACE_S = 0.1, 1.0


class DeviceTuner(OpenDevice):
    """Tunes shapes on one device."""

    def tune(self, task: Task, earlier: Sequence[Timing], emit: Emit, deadline: float = float("inf")) -> None:
        """Run all stages of one shape; the last event is its outcome.

        Args:
            task: the shape.
            earlier: final timings of earlier runs; their solutions do not run again.
            emit: receives each event.
            deadline: `time.monotonic` at which the stages should have ended. They try fewer
                solutions then; the worker gets a little longer.

        Raises:
            DeviceLost: the device stopped working.
            BudgetSpent: the shape could not be done by then. One that is cut short is done only if
                it is the first: a row is final, so the next run tries all its solutions.
        """
        self.client.deadline = deadline + max(LEAST_GRACE_S, GRACE * self.options.budget)
        ShapeRun(self, task, emit, deadline).run(earlier)
        self.finished += 1
        self.forget(task.shape)
