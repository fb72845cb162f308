"""Device tuner: one device, on which `shape_run` takes shapes through the stages."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.timing import Timing
from tunedgemm.tuner.compilers import Compilers
from tunedgemm.tuner.requests import GetVersions, ListSolutions
from tunedgemm.tuner.shape_run import Emit, ShapeRun
from tunedgemm.tuner.trial import Options, Place, Task
from tunedgemm.tuner.worker import AnyWorker, WorkerDied
from tunedgemm.tuner.worker_client import DeviceLost, WorkerClient

#: Time beyond the deadline in which the winner is verified: a share of the budget, and least
#: seconds.
GRACE, LEAST_GRACE_S = 0.1, 1.0


class DeviceTuner:
    """Tunes shapes on one device.

    Attributes:
        op: the op to tune.
        options: how to tune.
        client: sends requests to the device's worker.
        compilers: compile ahead; the device tuners of a machine share them.
        ranks: libtype to its rank for ties; its keys are the libtypes that may be stored.
        versions: libtype to its library version.
    """

    def __init__(self, op: Op, options: Options, worker: AnyWorker, compilers: Compilers, ranks: Mapping[str, int]) -> None:
        self.op, self.options, self.compilers, self.ranks = op, options, compilers, ranks
        self.client = WorkerClient(op, options, worker)
        self.versions: Mapping[str, str] = {}
        self._listed: dict[Shape, tuple[tuple[Solution, ...], Solution | None]] = {}

    @property
    def place(self) -> Place:
        """Return the device and its node; known after `begin`."""
        return self.client.place

    def begin(self) -> None:
        """Start the worker and ask for its device and library versions.

        Raises:
            DeviceLost: the device does not exist, or its worker dies.
        """
        self.client.begin()
        try:
            self.versions = self.client.ask(GetVersions())
        except WorkerDied as error:
            raise DeviceLost(f"its worker died on the request for library versions: {error}") from error

    def stop(self) -> None:
        """End the worker at once; a running `tune` raises `DeviceLost`."""
        self.client.stop()

    def ahead(self, task: Task) -> None:
        """List the solutions of a shape and compile them while others are timed."""
        if not task.only:
            with contextlib.suppress(WorkerDied):  # `tune` reports it
                solutions, _ = self.listed(task.shape)
                self.compilers.begin(task.shape, solutions, self.place.device)

    def listed(self, shape: Shape) -> tuple[tuple[Solution, ...], Solution | None]:
        """Return the solutions of a shape, and the baseline."""
        if shape not in self._listed:
            self._listed[shape] = self.client.ask(ListSolutions(shape))
        return self._listed[shape]

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
            BudgetSpent: the shape could not be done by then.
        """
        self.client.deadline = deadline + max(LEAST_GRACE_S, GRACE * self.options.budget)
        ShapeRun(self, task, emit, deadline).run(earlier)
        self._listed.pop(task.shape, None)
