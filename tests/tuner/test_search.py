"""Search: the beginning of measured lists comes first, and loses little in replayed logs."""

from __future__ import annotations

import functools
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from tunedgemm.backends.backend import Backend
from tunedgemm.backends.platforms import Platform
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.testing.fakes import fake_backend, fake_registry, with_hooks
from tunedgemm.timing import Timing
from tunedgemm.tuner.compilers import Compilers
from tunedgemm.tuner.device_tuner import DeviceTuner
from tunedgemm.tuner.screen import MORE_ROUNDS, screen
from tunedgemm.tuner.search import QUICK, QUICK_ROUNDS, Further
from tunedgemm.tuner.session import Session
from tunedgemm.tuner.trial import Event, Options, Outcome, Sampler, Samples, Task
from tunedgemm.tuner.worker import Inline
from tunedgemm.tuner.worker_client import BudgetSpent

SHAPE = Shape("a16w16", 4, 32, 64, "fp32")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "search.py"


def ranked(libtype: str = "turbo", count: int = 40, **answers: Any) -> Backend:
    """Return a backend whose kernels "0", "1", ... are in a measured order."""
    platforms = (Platform(("cpu",), ranked=("a16w16",)),)
    return fake_backend(libtype, solutions=tuple(map(str, range(count))), platforms=platforms, **answers)


def tuned(us: Callable[[Solution], float], *backends: Backend, **options: Any) -> Outcome:
    """Tune the shape over fake times; return the outcome."""
    return sampled(lambda launchers, rounds: {one: Samples((us(one),) * rounds) for one in launchers}, *backends, **options)


def sampled(sampler: Sampler, *backends: Backend, **options: Any) -> Outcome:
    """Tune the shape over a sampler; return the outcome."""
    registry = fake_registry(*backends)
    chosen = Options(libtype=",".join(backend.libtype for backend in backends), **{"iters": 8, "warmup": 1, **options})
    worker = Inline(functools.partial(Session, "a16w16", -1, chosen, registry, lambda *_: sampler))
    tuner = DeviceTuner(op_named("a16w16"), chosen, worker, Compilers(registry=registry), {b.libtype: 0 for b in backends})
    tuner.begin()
    events: list[Event] = []
    tuner.tune(Task(SHAPE), (), events.append)
    assert isinstance(events[-1], Outcome)
    return events[-1]


def tried(outcome: Outcome, libtype: str) -> set[int]:
    """Return the numbers of the tried kernels of a backend."""
    return {int(timing.solution.kernel_name) for timing in outcome.timings if timing.solution.libtype == libtype}


def test_a_quick_search_tries_the_beginning_of_a_list() -> None:
    """The default search tries 16 kernels, the full one all."""
    outcome = tuned(lambda one: 10.0, ranked())
    assert tried(outcome, "turbo") == set(range(QUICK.most))
    assert tried(tuned(lambda one: 10.0, ranked(), search="full"), "turbo") == set(range(40))


def test_kernels_of_equal_bits_in_repeated_runs_are_searched_fully() -> None:
    """All kernels at the beginning of a list may differ between runs; a class needs no such list."""
    assert tried(tuned(lambda one: 10.0, ranked(), deterministic=True), "turbo") == set(range(40))
    assert tried(tuned(lambda one: 10.0, ranked(), batch_invariant=True), "turbo") == set(range(QUICK.most))


def test_a_list_without_a_measured_order_is_searched_fully() -> None:
    """A backend that states no order keeps its whole list, another's is cut."""
    plain = fake_backend("plain", solutions=tuple(map(str, range(40))))
    outcome = tuned(lambda one: 10.0, plain, ranked())
    assert (len(tried(outcome, "plain")), len(tried(outcome, "turbo"))) == (40, QUICK.most)


@pytest.mark.parametrize(("us", "count"), [(10.9, QUICK.most), (11.1, QUICK.first)])
def test_a_backend_far_behind_stops_after_its_first_kernels(us: float, count: int) -> None:
    """Its further kernels are not even compiled, and the other's are."""
    outcome = tuned(lambda one: us if one.libtype == "slow" else 10.0, ranked("slow"), ranked())
    assert len(tried(outcome, "slow")) == count
    assert len(tried(outcome, "turbo")) == QUICK.most


@pytest.mark.parametrize(("search", "finalists", "rounds"), [("quick", QUICK.finalists, QUICK_ROUNDS), ("full", 20, 101)])
def test_a_quick_search_races_few_finalists(search: str, finalists: int, rounds: int) -> None:
    """Of equally fast kernels, four are checked in full and race for fewer rounds.

    The first guess may be a fifth.
    """
    noise, raced = random.Random(0), []

    def sample(launchers: Mapping[Solution, Any], count: int) -> dict[Solution, Samples | Exception]:
        raced.append(count if len(launchers) > finalists and count > MORE_ROUNDS else 0)
        return {one: Samples(tuple(noise.uniform(9.8, 10.2) for _ in range(count))) for one in launchers}

    outcome = sampled(sample, ranked(), search=search, iters=101, warmup=0)
    assert 0 <= sum(timing.status == "ok" for timing in outcome.timings) - finalists <= 2  # torch's call, too
    assert sum(raced) == rounds


def test_a_wrong_beginning_does_not_hide_the_rest() -> None:
    """If the first kernels are wrong, the rest of the list is tried, and none of the wrong ones wins."""

    def call(solution: Solution, shape: Shape, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = torch.nn.functional.linear(x, weight)
        return out + 1 if int(solution.kernel_name) < QUICK.first else out

    outcome = tuned(lambda one: 1.0 + int(one.kernel_name), ranked(call=call))
    assert outcome.winner is not None and outcome.winner.solution.kernel_name == str(QUICK.first)
    assert {timing.status for timing in outcome.timings if timing.solution.kernel_name in map(str, range(QUICK.first))} == {"wrong"}


def test_a_later_shape_without_time_for_the_rest_is_left() -> None:
    """The budget ends the checks before the rest of a list; only the first shape is stored then."""

    def bench(op: Any, shape: Any, device: Any) -> Any:
        waits = [2.1]  # seconds of the first sample

        def sample(launchers: dict[Solution, Any], rounds: int) -> dict[Solution, Samples]:
            time.sleep(waits.pop() if waits else 0.0)
            return {one: Samples((10.0,) * rounds) for one in launchers}

        return sample

    registry, options = fake_registry(ranked()), Options(libtype="turbo", budget=4.0, iters=8, warmup=1)
    worker = Inline(functools.partial(Session, "a16w16", -1, options, registry, bench))
    tuner = DeviceTuner(op_named("a16w16"), options, worker, Compilers(registry=registry), {"turbo": 0})
    tuner.begin()
    events: list[Event] = []
    tuner.tune(Task(SHAPE), (), events.append, time.monotonic() + options.budget)
    assert isinstance(events[-1], Outcome) and tried(events[-1], "turbo") == set(range(QUICK.first))
    with pytest.raises(BudgetSpent, match="no time for all candidates"):
        tuner.tune(Task(attrs.evolve(SHAPE, m=5)), (), events.append, time.monotonic() + options.budget)


def test_only_the_fastest_backend_is_refined_twice() -> None:
    """A backend within 2 % gets neighbours once; those of the fastest get theirs while that gains."""
    times = {"a": 10.0, "b": 10.1, "c": 10.3}
    asked: list[str] = []

    def neighbours(leaders: Sequence[Solution]) -> list[Solution]:
        asked.extend(sorted({leader.libtype for leader in leaders}))
        return [Solution(leader.libtype, leader.kernel_name + "+") for leader in leaders]

    def sample(solutions: Sequence[Solution], rounds: int) -> dict[Solution, Samples | Timing]:
        return {one: Samples((times[one.libtype] * 0.97 ** one.kernel_name.count("+"),) * rounds) for one in solutions}

    first = [Solution(libtype, "k") for libtype in times]
    screen(SHAPE, first, sample, 20, Further(neighbours, quick=frozenset(times)), 0.0)
    assert asked == ["a", "b", "a", "a"]


def test_neighbours_compile_while_the_rest_of_a_list_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """They compile after the rest of the list, and no more of them than a quick search takes."""
    begun: list[list[str]] = []
    monkeypatch.setattr(Compilers, "begin", lambda _, shape, given, *__, **how: begun.append([one.kernel_name for one in given]))
    near = [str(number) for number in range(100, 200)]
    backend = with_hooks(ranked(), refine=lambda solution: [Solution("turbo", name) for name in near])
    tuned(lambda one: 10.0, backend)
    rest = [str(number) for number in range(QUICK.first, QUICK.most)]
    assert [names for names, _ in itertools.groupby(begun)][1:] == [rest + near[: QUICK.near], rest, near[: QUICK.near]]


def test_compiled_kernels_are_checked_while_others_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow compilation of the first kernel delays no check of the others. It stays the first."""
    checked: list[str] = []

    def call(solution: Solution, shape: Shape, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        checked.append(solution.kernel_name)
        return torch.nn.functional.linear(x, weight)

    def compiled(_: Compilers, shape: Shape, solutions: Sequence[Solution], device: object) -> list[Solution]:
        return [one for one in solutions if one.kernel_name != "0"]

    monkeypatch.setattr(Compilers, "compiled", compiled)
    outcome = tuned(lambda one: 10.0, ranked(count=4, call=call))
    assert list(dict.fromkeys(checked)) == ["1", "2", "3", "0"]
    assert outcome.winner is not None and outcome.winner.solution.kernel_name == "0"
    own = [timing.solution.kernel_name for timing in outcome.timings if timing.solution.libtype != "torch"]
    assert own == ["0", "1", "2", "3"], "reports judge the order of the list by that of the timings"


@pytest.fixture(scope="module")
def replaying(as_module: Callable[[Path], ModuleType]) -> ModuleType:
    """Load benchmarks/search.py."""
    for plugin in ("asm", "triton", "skinny"):
        pytest.importorskip(f"tunedgemm_{plugin}")
    return as_module(SCRIPT)


@pytest.mark.parametrize(
    ("file", "every", "mean"),
    [
        ("h200-2026-11-26/a16w16-trials.csv.gz", 4, 0.005),
        ("h200-2026-11-28/a8w8-trials.csv.gz", 1, 0.005),
        ("h200-2026-11-28/a8w8_blockscale-trials.csv.gz", 1, 0.005),
    ],
    ids=["bf16", "fp8 by row", "fp8 by block"],
)
def test_the_quick_search_loses_less_than_half_a_percent(replaying: ModuleType, file: str, every: int, mean: float) -> None:
    """It compiles half as many."""
    replayed: Iterable[Any] = replaying.replay(file, every)
    replayed = list(replayed)
    assert statistics.mean(each.loss for each in replayed) <= mean
    assert sum(each.quick.total() for each in replayed) <= 0.6 * sum(each.full.total() for each in replayed)


def test_the_page_has_a_row_for_each_m(replaying: ModuleType) -> None:
    """The first row of a log is of all M."""
    rows = replaying.rows_of(replaying.replay("h200-2026-11-28/a8w8-trials.csv.gz", 3))
    assert rows[0]["M"] == "all" and rows[0]["shapes"] == sum(row["shapes"] for row in rows[1:])
