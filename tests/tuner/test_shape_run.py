"""Shape run: the stages of one shape when time is short."""

from __future__ import annotations

import functools
import time
from typing import Any

import pytest
import torch
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.testing.fakes import fake_backend, fake_registry
from tunedgemm.tuner.compilers import Compilers
from tunedgemm.tuner.device_tuner import DeviceTuner
from tunedgemm.tuner.session import Session
from tunedgemm.tuner.trial import Event, Options, Outcome, Samples, Task
from tunedgemm.tuner.worker import Inline, Worker
from tunedgemm.tuner.worker_client import BudgetSpent

OP = op_named("a16w16")
TASK = Task(Shape("a16w16", 4, 32, 64, "fp32"))


def sleeps(op: Any, shape: Shape, device: Any) -> Any:
    """Take a minute for a sample."""
    return lambda launchers, rounds: time.sleep(60)


def test_the_budget_binds_inside_a_shape() -> None:
    """A worker that is busy at the end of the budget is ended, and the shape is left to the next run."""
    options = Options(libtype="torch", budget=0.5)
    worker = Worker(functools.partial(Session, OP.name, -1, options, bench=sleeps))
    made = DeviceTuner(OP, options, worker, Compilers(), {"torch": 0})
    made.begin()
    made.listed(TASK.shape)
    started = time.monotonic()

    with pytest.raises(BudgetSpent):
        made.tune(TASK, (), lambda event: None, started + options.budget)

    assert time.monotonic() - started < 10
    made.stop()


def slow_checks() -> tuple[DeviceTuner, Options]:
    """Return a tuner of a backend with more kernels than six seconds suffice for; "k3" is the fastest."""

    def call(solution, shape, x, weight):
        time.sleep(0.005)
        return torch.nn.functional.linear(x, weight)

    def bench(op: Any, shape: Shape, device: Any) -> Any:
        us = {"k3": 5.0}
        return lambda launchers, rounds: {one: Samples((us.get(one.kernel_name, 10.0),) * rounds) for one in launchers}

    registry = fake_registry(fake_backend("turbo", solutions=tuple(f"k{number}" for number in range(2000)), call=call))
    options = Options(libtype="turbo", iters=8, warmup=1, budget=6.0)
    worker = Inline(functools.partial(Session, OP.name, -1, options, registry, bench))
    made = DeviceTuner(OP, options, worker, Compilers(registry=registry), {"turbo": 0})
    made.begin()
    return made, options


def test_fewer_solutions_are_tried_when_time_is_short() -> None:
    """Half of a shape's time goes to trying solutions; the best of those that were tried is stored."""
    made, options = slow_checks()
    told: list[Event] = []

    made.tune(TASK, (), told.append, time.monotonic() + options.budget)

    outcome = told[-1]
    assert isinstance(outcome, Outcome) and outcome.winner is not None
    assert outcome.winner.solution.kernel_name == "k3"
    assert 16 <= len(outcome.timings) < 1900
    assert made.finished == 1


def test_only_the_first_shape_is_stored_when_cut_short() -> None:
    """A later shape of the run is left to the next one, which tries all its solutions."""
    made, _ = slow_checks()
    made.finished = 1
    told: list[Event] = []

    with pytest.raises(BudgetSpent):
        made.tune(TASK, (), told.append, time.monotonic() + 0.5)

    assert not any(isinstance(event, Outcome) for event in told)
