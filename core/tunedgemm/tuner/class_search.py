"""Find the bit classes of a run's shapes: measure bits, time the members, check what they serve."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs

from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.tuner.classes import Group
from tunedgemm.tuner.trial import ChosenClass, Outcome, Task

#: Most rounds of accurate timing: a kernel that fails, or is slower than its rough time, gives way.
_ROUNDS = 3

#: Runs tasks on the devices; returns the outcomes, and the shapes whose tasks are left.
Work = Callable[[Sequence[Task]], tuple[Sequence[Outcome], frozenset[Shape]]]


@attrs.define(eq=False)
class ClassSearch:
    """The search for the classes of groups on one kind of device.

    Attributes:
        groups: the finished shapes of each (N, K).
        work: runs tasks.
    """

    groups: Sequence[Group]
    work: Work
    _left: set[Shape] = attrs.field(factory=set, init=False)

    def run(self) -> tuple[list[ChosenClass], list[Group]]:
        """Return the classes, and the groups that the budget or lost devices left incomplete."""
        near = {group.shape: group.within_reach() for group in self.groups}
        tasks = [Task(group.shape, only=near[group.shape], check="bits", sizes=group.sizes) for group in self.groups]
        for outcome in self._outcomes(tasks):
            self._group_of(outcome).bits = {timing.solution: timing for timing in outcome.timings}
        for group in self._whole:
            group.report_broken_claims()
        for _ in range(_ROUNDS):
            self._ask(Group.untimed, "")
        while self._ask(Group.unserved, "check_served"):  # each round checks or excludes one
            pass
        return [group.chosen() for group in self._whole], [group for group in self.groups if group.shape in self._left]

    @property
    def _whole(self) -> list[Group]:
        return [group for group in self.groups if group.shape not in self._left]

    def _ask(self, missing: Callable[[Group], Mapping[Shape, tuple[Solution, ...]]], check: str) -> bool:
        """Check what is missing, or time it without a check; return whether anything was."""
        wanted = [Task(shape, only=only, check=check) for group in self._whole for shape, only in missing(group).items()]
        for outcome in self._outcomes(wanted) if wanted else ():
            self._take(self._group_of(outcome), outcome)
        return bool(wanted)

    def _take(self, group: Group, outcome: Outcome) -> None:
        shape, only = outcome.task.shape, outcome.task.only
        for timing in outcome.timings:
            if timing.solution not in only:
                continue
            if outcome.task.check and timing.status == "ok":
                group.served.add((shape, timing.solution))
            else:
                group.times[shape][timing.solution] = timing
        if not outcome.task.check and outcome.winner is not None:
            group.served.add((shape, outcome.winner.solution))

    def _outcomes(self, tasks: Sequence[Task]) -> Iterable[Outcome]:
        outcomes, left = self.work(tasks)
        self._left |= {group.shape for group in self.groups if left & {group.shape, *group.times}}
        return [outcome for outcome in outcomes if self._group_of(outcome).shape not in self._left]

    def _group_of(self, outcome: Outcome) -> Group:
        shape = outcome.task.shape
        return next(group for group in self.groups if shape == group.shape or shape in group.times)
