"""DeviceTuner: a backend that fails in its hooks costs itself; the others are listed and tuned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from tunedgemm.backends.registry import Registry
from tunedgemm.errors import PluginError
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.testing.fakes import fake_backend, fake_registry
from tunedgemm.tuner.compilers import Compilers
from tunedgemm.tuner.device_tuner import DeviceTuner
from tunedgemm.tuner.session import Session
from tunedgemm.tuner.trial import Event, Options, Outcome, Task
from tunedgemm.tuner.worker import WorkerDied

SHAPE = Shape("a16w16", 4, 32, 64, "fp32")
QUICK = Options(iters=8, warmup=1)
Dies = Callable[[Any], str]


@attrs.define
class Mortal:
    """A worker in this process that is lost at chosen requests."""

    options: Options
    registry: Registry
    dies: Dies
    requests: list[Any] = attrs.field(factory=list)
    session: Session | None = None

    def __call__(self, request: Any, *, timeout: float = 0.0) -> Any:
        self.requests.append(request)
        if status := self.dies(request):
            raise WorkerDied(status, f"in {request}")
        self.session = self.session or Session("a16w16", -1, self.options, self.registry)
        return request.run(self.session)


def linear(solution, shape, x, weight):
    return torch.nn.functional.linear(x, weight)


def tuned(made: DeviceTuner) -> Outcome:
    events: list[Event] = []
    made.tune(Task(SHAPE), (), events.append)
    assert isinstance(events[-1], Outcome)
    return events[-1]


def two_backends(dies: Dies, **options: Any) -> DeviceTuner:
    """Return a tuner of the backends "bad" and "turbo"."""
    both = [fake_backend(libtype, solutions=(libtype,), call=linear) for libtype in ("bad", "turbo")]
    options = attrs.evolve(QUICK, libtype="bad,turbo", **options)
    registry = fake_registry(*both)
    made = DeviceTuner(op_named("a16w16"), options, Mortal(options, registry, dies), Compilers(registry=registry), {"bad": 0, "turbo": 1})  # type: ignore[arg-type]
    made.begin()
    return made


@pytest.mark.parametrize(("kind", "hook"), [("refusal", "supports"), ("solutions", "enumerate_solutions")])
@pytest.mark.parametrize("status", ["crashed", "hung", "PluginError", "KeyError"])
def test_a_backend_that_fails_in_its_list_costs_itself(kind: str, hook: str, status: str, caplog: pytest.LogCaptureFixture) -> None:
    """The others are tuned; the warning names the shape, the libtype and the hook."""

    def dies(request: Any) -> str:
        if request.method != kind or request.arguments[0] != "bad":
            return ""
        if status in ("crashed", "hung"):
            return status
        raise {"PluginError": PluginError, "KeyError": KeyError}[status](f"libtype 'bad': {hook}() raised")

    made = two_backends(dies)
    outcome = tuned(made)

    assert outcome.winner is not None and str(outcome.winner.solution) == "turbo:turbo"
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(f"{SHAPE}: left out: libtype 'bad': {hook}() ")
    assert "bad" in made.listed(SHAPE).reasons


def test_a_backend_that_ends_every_worker_is_left_out_of_the_run(caplog: pytest.LogCaptureFixture) -> None:
    """After three lost workers it is not asked again: each may take two minutes."""
    made = two_backends(lambda request: "hung" if request.method == "refusal" and request.arguments[0] == "bad" else "")
    listings = [made.listed(attrs.evolve(SHAPE, m=m)) for m in range(1, 6)]
    assert all([str(solution) for solution in listing.solutions] == ["turbo:turbo"] for listing in listings)
    assert len(caplog.records) == 3 and "left out of this run" in listings[-1].reasons


def test_a_library_version_that_ends_the_worker_costs_its_backend(caplog: pytest.LogCaptureFixture) -> None:
    """Processes that dispatch ask for it as well, so the backend is left out, and the others are tuned."""
    made = two_backends(lambda request: "crashed" if request.method == "version" and request.arguments[0] == "bad" else "")
    assert [str(solution) for solution in made.listed(SHAPE).solutions] == ["turbo:turbo"]
    assert "left out: libtype 'bad': library_version() ended the worker" in caplog.text


def test_a_backend_that_fails_to_refine_costs_its_neighbours(caplog: pytest.LogCaptureFixture) -> None:
    """Neighbours of another backend are listed."""
    made = two_backends(lambda request: "crashed" if request.method == "neighbours" and request.arguments[1][0].libtype == "bad" else "")
    leaders = [Solution(libtype, libtype) for libtype in ("bad", "turbo")]
    concerned: Any = made.client.worker
    assert made.neighbours(SHAPE, leaders) == []
    asked = [request.arguments[1][0].libtype for request in concerned.requests if request.method == "neighbours"]
    assert asked == ["bad", "turbo"] and "libtype 'bad': refine() ended the worker" in caplog.text
