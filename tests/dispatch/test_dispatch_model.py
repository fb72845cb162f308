"""Dispatch does what a model of thirty lines does, in any order of calls, failures, reloads and forks."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from tunedgemm.device import device_of
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.integrations.linear import routed_linear
from tunedgemm.ops import op_named
from tunedgemm.plugin import Launcher, Unsupported, hookimpl
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, write_rows
from tunedgemm.testing.fakes import FakeHooks, fake_backend, fake_registry

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

OP = op_named("a16w16")
WEIGHT = torch.arange(16.0 * 32).view(16, 32) % 7
HERE = device_of(-1)
TORCH = "native"
#: The kernels of two backends, and the orders in which a table may rank them.
LIBTYPES = {"a": "alpha", "b": "beta", "c": "alpha"}
ORDERS = tuple(itertools.permutations(LIBTYPES))
ROWS = (4, 64)
FORMS = {(way, *sizes): (way, sizes) for way in ("function", "by name", "F.linear") for sizes in ((-1,), (2, -1), (1, 2, -1))}
RAISED = (RuntimeError, ValueError, SystemExit, GeneratorExit, KeyboardInterrupt)


class Model:
    """Names the kernel that serves: the table's first that is not vetoed and binds, else torch."""

    def __init__(self) -> None:
        self.order: tuple[str, ...] = ()
        self.failing: set[str] = set()
        self.refused: set[str] = set()
        self.reload()

    def reload(self) -> None:
        self.vetoed: set[tuple[int, str]] = set()
        self.bound: dict[int, str] = {}
        self.cached: dict[tuple[int, Any], str] = {}

    def load(self, order: tuple[str, ...]) -> None:
        self.order = order
        self.reload()

    def choice(self, m: int) -> str:
        usable = (kernel for kernel in self.order if (m, kernel) not in self.vetoed and kernel not in self.refused)
        return next(usable, TORCH)

    def call(self, m: int, form: Any = None) -> str:
        while True:
            kernel = self.cached.get((m, form)) or self.bound.setdefault(m, self.choice(m))
            if form is not None:
                self.cached[m, form] = kernel
            if kernel not in self.failing:
                return kernel
            self.vetoed.add((m, kernel))
            self.bound = {each: bound for each, bound in self.bound.items() if (each, bound) != (m, kernel)}
            self.cached = {place: bound for place, bound in self.cached.items() if (place[0], bound) != (m, kernel)}


class Hooks(FakeHooks):
    """Kernels of one libtype that fail, refuse to bind and wait when the machine says so."""

    def __init__(self, libtype: str, machine: Dispatch) -> None:
        super().__init__(libtype, solutions=[name for name, owner in LIBTYPES.items() if owner == libtype])
        self.machine = machine

    @hookimpl
    def heuristic_fallback(self, shape: Shape) -> None:
        """Choose nothing; wait, where the shape of a thread is to be bound for long."""
        if shape.m == self.machine.slow:
            self.machine.binding.set()
            self.machine.forked.wait(20)

    @hookimpl
    def bind(self, solution: Solution, shape: Shape, device: Any) -> Launcher | Unsupported:
        """Bind a kernel, refuse it or raise."""
        machine, name = self.machine, solution.kernel_name
        if refusal := machine.refusals.get(name):
            if issubclass(refusal, BaseException):
                raise refusal
            return Unsupported("not today")

        def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            if error := machine.errors.get(name):
                time.sleep(machine.pause)
                raise error
            machine.served.by = name
            return torch.nn.functional.linear(x, weight)

        return Launcher(call)


class Served(threading.local):
    """The kernel that served a thread's last call."""

    by = TORCH


class Dispatch(RuleBasedStateMachine):
    """Do the same with a dispatcher and with the model."""

    def __init__(self, folder: Path, in_child: Callable[[Callable[[], object]], str]) -> None:
        super().__init__()
        self.table, self.us, self.in_child = folder / "tuned.csv", 1e6, in_child
        self.model, self.served = Model(), Served()
        self.errors: dict[str, type[BaseException]] = {}
        self.refusals: dict[str, type] = {}
        self.pause, self.slow, self.fresh = 0.0, 0, itertools.count(1000)
        registry = fake_registry(*(fake_backend(libtype, hooks=Hooks(libtype, self)) for libtype in set(LIBTYPES.values())))
        self.gemm = TunedGemm(registry, settings=Settings(untuned=("alpha",)))
        self.dispatcher = self.gemm.dispatcher
        self.linear = routed_linear(self.dispatcher)
        self.load(ORDERS[0])

    def serve(self, m: int, form: Any) -> str:
        """Call one form of a shape, check its numbers, and return the kernel that served."""
        way, sizes = FORMS[form]
        x = torch.arange(m * 32.0).view(*sizes, 32) % 5
        self.served.by = TORCH
        out = {"function": self.gemm.gemm_a16w16, "by name": self.dispatcher.call, "F.linear": self.linear}[way](x, WEIGHT)
        assert torch.equal(out, torch.nn.functional.linear(x, WEIGHT))
        return self.served.by

    def agree(self, calls: list[tuple[int, Any]]) -> bool:
        """Check that dispatch and model serve some calls by the same kernels."""
        for m, form in calls:
            assert self.serve(m, form) == self.model.call(m, form)
        return True

    @rule(order=st.sampled_from(ORDERS))
    def load(self, order: tuple[str, ...]) -> None:
        """Load a table of lower times, which puts another order above those so far."""
        self.us /= 2
        rows = [
            Row(shape=Shape("a16w16", m, 16, 32, dtype="fp32"), gfx=HERE.gfx, cu_num=HERE.cu_num, device=HERE.name,
                solution=Solution(LIBTYPES[kernel], kernel), us=self.us * (1 + place / 10))
            for m in ROWS for place, kernel in enumerate(order)
        ]  # fmt: skip
        write_rows(self.table, OP, rows)
        self.gemm.load_config(self.table)
        self.model.load(order)

    @rule()
    def reload(self) -> None:
        """Read all tables again, which forgets failures."""
        self.dispatcher.reload()
        self.model.reload()

    @rule(kernel=st.sampled_from(list(LIBTYPES)), error=st.sampled_from([None, *RAISED]))
    def fail(self, kernel: str, error: type[BaseException] | None) -> None:
        """Let a kernel raise in its calls, or work again."""
        self.errors.pop(kernel, None)
        self.model.failing.discard(kernel)
        if error is not None:
            self.errors[kernel] = error
            self.model.failing.add(kernel)

    @rule(kernel=st.sampled_from(list(LIBTYPES)), refusal=st.sampled_from([None, Unsupported, *RAISED]))
    def refuse(self, kernel: str, refusal: type | None) -> None:
        """Let a kernel refuse to bind, or bind again."""
        self.refusals.pop(kernel, None)
        self.model.refused.discard(kernel)
        if refusal is not None:
            self.refusals[kernel] = refusal
            self.model.refused.add(kernel)

    @rule(m=st.sampled_from(ROWS), form=st.sampled_from(list(FORMS)))
    def call(self, m: int, form: Any) -> None:
        """Call, and ask what would serve the next new form."""
        self.agree([(m, form)])
        explained = self.dispatcher.explain(Shape("a16w16", m, 16, 32, dtype="fp32"), HERE)
        assert explained.offer.solution.kernel_name == self.model.choice(m)

    @rule(m=st.sampled_from(ROWS))
    def prewarm(self, m: int) -> None:
        """Bind and run a shape."""
        self.served.by = TORCH
        assert self.dispatcher.prewarm([Shape("a16w16", m, 16, 32, dtype="fp32")], HERE) == 1
        assert self.served.by == self.model.call(m)

    @rule(m=st.sampled_from(ROWS), forms=st.lists(st.sampled_from(list(FORMS)), min_size=2, max_size=6, unique=True))
    def threads(self, m: int, forms: list[Any]) -> None:
        """Call from several threads at once: none raises, and each is served by the kernel that is left."""
        start, answers = threading.Barrier(len(forms)), {}
        self.pause = 0.005  # all are inside a failing kernel together

        def work(form: Any) -> None:
            start.wait()
            try:
                answers[form] = self.serve(m, form)
            except BaseException as error:
                answers[form] = repr(error)

        started = [threading.Thread(target=work, args=(form,)) for form in forms]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
        self.pause = 0.0
        assert answers == {form: self.model.call(m, form) for form in forms}

    @rule(calls=st.lists(st.tuples(st.sampled_from(ROWS), st.sampled_from(list(FORMS))), min_size=1, max_size=4), busy=st.booleans())
    def fork(self, calls: list[tuple[int, Any]], busy: bool) -> None:
        """Serve calls in a forked child, while another thread binds a shape or not."""
        binder = threading.Thread(target=self.gemm.gemm_a16w16, args=(torch.ones(next(self.fresh), 32), WEIGHT))
        self.binding, self.forked = threading.Event(), threading.Event()
        if busy:
            self.slow = binder._args[0].shape[0]  # type: ignore[attr-defined]
            binder.start()
            assert self.binding.wait(10)
        try:
            new = (next(self.fresh), next(iter(FORMS)))
            assert self.in_child(lambda: self.agree(calls) and self.serve(*new) == TORCH) == "served"
        finally:
            self.forked.set()
            if busy:
                binder.join()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a fork wait for other threads for a moment only."""
    monkeypatch.setattr("tunedgemm.process.forksafe.PATIENCE", 0.02, raising=False)
    return iter([None])


@pytest.mark.parametrize("examples", [pytest.param(40, id="few"), pytest.param(300, id="many", marks=pytest.mark.nightly)])
def test_dispatch_does_what_its_model_does(examples: int, tmp_path: Path, in_child: Any, hasty_switches: None) -> None:
    """Any sequence of calls, failures, refusals, tables, threads and forks gives the model's kernels."""
    run_state_machine_as_test(
        lambda: Dispatch(tmp_path, in_child),
        settings=settings(
            max_examples=examples, stateful_step_count=20, deadline=None, derandomize=examples < 300, database=None,
            suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
        ),
    )  # fmt: skip
