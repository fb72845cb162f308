"""DeviceTuner: the stages of a shape over a worker that may die at any call.

Only the solution that was running is to blame.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import torch
from tunedgemm.backends.registry import Registry
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.testing.fakes import fake_backend, fake_registry
from tunedgemm.timing import Timing
from tunedgemm.tuner.compilers import Compilers
from tunedgemm.tuner.device_tuner import DeviceTuner
from tunedgemm.tuner.session import Session
from tunedgemm.tuner.trial import Bench, Event, Options, Outcome, Samples, Step, Task, Trials
from tunedgemm.tuner.worker import WorkerDied
from tunedgemm.tuner.worker_client import DeviceLost

SHAPE = Shape("a16w16", 4, 32, 64, "fp32")
QUICK = Options(libtype="turbo", iters=8, warmup=1)
Dies = Callable[[Any], str]


@attrs.define
class Mortal:
    """A worker in this process that dies at chosen requests, and has a new session then."""

    registry: Registry
    options: Options
    dies: Dies
    bench: Bench | None = None
    requests: list[Any] = attrs.field(factory=list)
    session: Session | None = None
    stopped: bool = False

    def __call__(self, request: Any, *, timeout: float = 0.0) -> Any:
        parts = request.arguments[0] if request.method == "each" else (request,)
        self.requests.extend(parts)
        status = "crashed" if self.stopped else next(filter(None, map(self.dies, parts)), "")
        if status:
            self.session = None
            raise WorkerDied(status, f"in {request}")
        self.session = self.session or Session("a16w16", -1, self.options, self.registry, self.bench)
        return request.run(self.session)

    def stop(self) -> None:
        self.stopped = True


def linear(solution, shape, x, weight):
    return torch.nn.functional.linear(x, weight)


def clock(**us: float) -> Bench:
    """Times without noise: 10 us a call unless given by kernel name."""

    def bench(op: Any, shape: Shape, device: Any) -> Any:
        return lambda launchers, rounds: {solution: Samples((us.get(solution.kernel_name, 10.0),) * rounds) for solution in launchers}

    return bench


def device_tuner(dies: Dies, options: Options = QUICK, bench: Bench | None = None) -> DeviceTuner:
    registry = fake_registry(fake_backend("turbo", solutions=("one", "two", "three"), call=linear))
    worker = Mortal(registry, options, dies, bench)
    made = DeviceTuner(op_named("a16w16"), options, worker, Compilers(registry=registry), {"turbo": 0})  # type: ignore[arg-type]
    made.begin()
    return made


def tuned(made: DeviceTuner, known: Sequence[Timing] = (), task: Task | None = None, **how: Any) -> tuple[Outcome, list[Event]]:
    told: list[Event] = []
    made.tune(task or Task(SHAPE), known, told.append, **how)
    assert isinstance(told[-1], Outcome), "the outcome is the last that is told"
    return told[-1], told


def statuses(outcome: Outcome) -> dict[str, str]:
    return {timing.solution.kernel_name: timing.status for timing in outcome.timings if timing.solution.libtype == "turbo"}


def concerns(request: Any, name: str) -> bool:
    """Whether a request names a kernel."""
    about = request.arguments[1] if request.method in ("bind", "check", "check_first", "check_again", "sample") else ()
    return any(solution.kernel_name == name for solution in (about if isinstance(about, tuple) else (about,)))


def dies_at(kind: str, name: str, status: str = "crashed") -> Dies:
    """Die at each call of a method that names a kernel."""
    return lambda request: status if request.method == kind and concerns(request, name) else ""


def never(request: Any) -> str:
    return ""


@pytest.mark.parametrize(("kind", "status", "wanted"), [
    ("bind", "crashed", "crashed"), ("bind", "hung", "compile_timeout"), ("check", "hung", "hung"), ("check", "fault", "fault"),
    ("check_first", "fault", "fault"), ("sample", "crashed", "crashed"), ("check_again", "crashed", "crashed"),
])  # fmt: skip
def test_a_crash_blames_the_running_solution(kind: str, status: str, wanted: str) -> None:
    """Wherever "two" ends the worker, only it gets the status, and the others are measured
    normally.
    """
    outcome, _ = tuned(device_tuner(dies_at(kind, "two", status), bench=clock()))

    found = statuses(outcome)
    assert found.pop("two") == wanted
    assert set(found.values()) <= {"ok", "screened"}
    assert outcome.winner is not None
    assert outcome.winner.solution.kernel_name in ("one", "three")


def names_in(tuner: DeviceTuner, kind: str) -> list[str]:
    """The kernels of the requests of a kind."""
    worker: Any = tuner.client.worker
    return [request.arguments[1].kernel_name for request in worker.requests if request.method == kind]


def test_the_right_ones_of_a_batch_are_checked_once() -> None:
    """Solutions are checked together, and one by one only where one of them ends the worker."""
    made = device_tuner(never, bench=clock())
    tuned(made)
    assert len(names_in(made, "check_first")) == 4

    made = device_tuner(dies_at("check_first", "two"), bench=clock())
    tuned(made)
    assert sorted(names_in(made, "check_first")) == ["native", "native", "one", "one", "three", "three", "two", "two"]


def test_only_kept_solutions_are_checked_fully() -> None:
    """One right call is enough for a rough timing.

    Slow solutions cost no further check, and every solution is checked before accurate timing.
    """
    made = device_tuner(never, bench=clock(three=20.0))
    outcome, _ = tuned(made)

    assert set(names_in(made, "check_first")) == {"native", "one", "two", "three"}
    assert sorted(names_in(made, "check")) == ["native", "one", "two"]
    assert statuses(outcome)["three"] == "screened"


def test_deterministic_runs_check_all_solutions_fully() -> None:
    """Otherwise the screen might keep only solutions that fail, and drop all that pass."""
    options = attrs.evolve(QUICK, deterministic=True)
    made = device_tuner(never, options, bench=clock(three=20.0))
    tuned(made)

    assert set(names_in(made, "check")) == {"native", "one", "two", "three"}
    assert not names_in(made, "check_first")


def test_a_solution_that_fails_the_full_check_drops_no_other() -> None:
    """The fastest is right once and wrong on other operands.

    Solutions that were dropped for it are timed again, and one wins.
    """
    bench = clock(one=1.0, two=20.0, three=25.0)
    found = device_tuner(dies_at("check", "one"), bench=bench)
    outcome, told = tuned(found)

    assert outcome.winner is not None
    assert (outcome.winner.solution.kernel_name, statuses(outcome)["one"]) == ("two", "crashed")
    final = [timing.solution for event in told if isinstance(event, Trials) for timing in event.timings]
    assert len(set(final)) == len(final)


def among_five(us: Callable[[set[str]], dict[str, float]]) -> Outcome:
    """Return the outcome of five solutions whose times depend on which others are timed."""

    def bench(op: Any, shape: Shape, device: Any) -> Any:
        def sampled(launchers: Any, rounds: int) -> Any:
            times = us({solution.kernel_name for solution in launchers})
            return {solution: Samples((times[solution.kernel_name],) * rounds) for solution in launchers}

        return sampled

    backend = fake_backend("turbo", solutions=("one", "two", "three", "four", "five"), call=linear)
    made = device_tuner(never)
    made.client.worker = Mortal(fake_registry(backend), QUICK, never, bench=bench)  # type: ignore[assignment]
    return tuned(made)[0]


def test_the_leaders_and_the_first_guess_are_timed_alone() -> None:
    """A solution that dropped out among many wins if it is the fastest among few."""
    others = {"two": 10.0, "three": 10.1, "four": 10.2, "five": 10.3, "native": 30.0}
    outcome = among_five(lambda names: {**others, "one": 10.8 if len(names) > 4 else 9.5})

    assert outcome.winner is not None
    assert (outcome.winner.solution.kernel_name, outcome.winner.us) == ("one", 9.5)


def test_all_times_are_scaled_to_the_last_comparison() -> None:
    """If all are faster among few, the baseline, which is not one of them, is scaled alike."""
    us = {"one": 10.0, "two": 10.1, "three": 10.2, "four": 10.9, "five": 11.0, "native": 30.0}
    outcome = among_five(lambda names: {name: each * (1.0 if "native" in names else 0.9) for name, each in us.items()})

    assert outcome.baseline is not None
    assert (outcome.gain, outcome.baseline.us) == (pytest.approx(3.0), pytest.approx(27.0))


def test_a_late_failure_drops_no_other() -> None:
    """The fastest fails once everything was timed.

    Solutions that were dropped for it are timed again, and each is final once.
    """
    bench = clock(one=1.0, two=20.0)
    outcome, told = tuned(device_tuner(dies_at("check_again", "one"), bench=bench))

    assert outcome.winner is not None
    assert outcome.winner.solution.kernel_name == "three"
    assert statuses(outcome)["one"] == "crashed"
    final = [timing.solution for event in told if isinstance(event, Trials) for timing in event.timings]
    assert len(set(final)) == len(final)


def test_an_unreproduced_crash_blames_no_solution() -> None:
    """An unreproduced crash blames no solution."""
    deaths = iter([True])

    def dies(request: Any) -> str:
        return "crashed" if request.method == "sample" and len(request.arguments[1]) > 1 and next(deaths, False) else ""

    made = device_tuner(dies)

    outcome, _ = tuned(made)

    assert set(statuses(outcome).values()) <= {"ok", "screened"}
    assert all(timing.samples for timing in outcome.timings if timing.ok)


def test_final_timings_are_emitted_at_once_and_only_once() -> None:
    """A failure is emitted before the outcome, so that it is kept if the run ends in between."""
    made = device_tuner(dies_at("check", "one"))

    outcome, told = tuned(made)

    final = [timing for event in told if isinstance(event, Trials) for timing in event.timings]
    assert ("one", "crashed") in [(timing.solution.kernel_name, timing.status) for timing in final]
    assert len({timing.solution for timing in final}) == len(final)
    assert all(timing in outcome.timings for timing in final)
    assert {event.activity for event in told if isinstance(event, Step)} >= {"list", "compile", "check", "screen", "time"}


def test_solutions_with_known_timings_do_not_run() -> None:
    """Final timings of an interrupted run are kept; their solutions are not even bound."""
    made = device_tuner(never)
    known = [Timing(SHAPE, Solution("turbo", "two"), "crashed", detail="the last time")]

    outcome, told = tuned(made, known)

    assert statuses(outcome)["two"] == "crashed"
    assert not [request for request in made.client.worker.requests if concerns(request, "two")]
    assert not [event for event in told if isinstance(event, Trials) and known[0] in event.timings]


def test_only_some_solutions_are_timed_where_a_task_says_so() -> None:
    """Only the named solutions and the baseline are timed, without screen and neighbours."""
    made = device_tuner(never)

    outcome, told = tuned(made, task=Task(SHAPE, only=(Solution("turbo", "three"),)))

    assert statuses(outcome) == {"three": "ok"}
    assert outcome.baseline is not None
    assert "screen" not in {event.activity for event in told if isinstance(event, Step)}


@pytest.mark.parametrize(("most", "refines"), [(0, True), (4, False), (5, True)])
def test_few_candidates_are_not_refined(most: int, refines: bool) -> None:
    """Below five candidates, the best guesses alone are timed."""
    made = device_tuner(never, Options(libtype="turbo", iters=8, warmup=1, candidates=most))
    tuned(made)
    assert any(request.method == "neighbours" for request in made.client.worker.requests) is refines


def test_a_lost_device_blames_no_solution() -> None:
    """If no new worker can be started, the device is lost, and another tunes its shape."""
    died: list[str] = []

    def dies(request: Any) -> str:
        if request.method == "check" or died:
            died.append(request.method)
            return "fault"
        return ""

    with pytest.raises(DeviceLost, match="no worker can be started"):
        tuned(device_tuner(dies))
    assert died == ["check", "place"]


def test_operands_that_do_not_fit_end_the_shape() -> None:
    """Out of memory before any kernel ran: every solution has that status."""

    def too_large(op, shape, device):
        raise MemoryError("64 GiB")

    registry = fake_registry(fake_backend("turbo", solutions=("one",), call=linear))
    worker = Mortal(registry, QUICK, never, bench=too_large)
    made = device_tuner(never)
    made.client.worker = worker  # type: ignore[assignment]

    outcome, _ = tuned(made)

    assert outcome.winner is None
    assert set(statuses(outcome).values()) == {"out_of_memory"}


@pytest.mark.parametrize("name", ["incumbent", "guess"])
def test_what_serves_stays_unless_it_loses_a_paired_comparison(name: str) -> None:
    """The table's row, or an untuned call's guess, stays unless another is clearly faster."""
    task = Task(SHAPE, **{name: Solution("turbo", "three")})

    same, _ = tuned(device_tuner(never, bench=clock(three=10.04)), task=task)
    slow, _ = tuned(device_tuner(never, bench=clock(three=10.1)), task=task)

    assert (same.winner and same.winner.solution) == task.holder
    assert (slow.winner and slow.winner.solution.kernel_name) == "one"


def test_the_tables_row_is_measured_even_if_unlisted() -> None:
    """Refinement may not find the same solution again.

    It keeps its shape all the same, unless it fails.
    """
    found = Solution("turbo", "refined")
    backend = fake_backend("turbo", solutions=("one", "two"), heuristic="refined", call=linear)
    for us, wanted in ((8.0, "refined"), (12.0, "one")):
        made = device_tuner(never)
        made.client.worker = Mortal(fake_registry(backend), QUICK, never, bench=clock(refined=us))  # type: ignore[assignment]
        outcome, _ = tuned(made, task=Task(SHAPE, incumbent=found))
        assert (outcome.winner and outcome.winner.solution.kernel_name) == wanted

    gone, _ = tuned(device_tuner(never, bench=clock()), task=Task(SHAPE, incumbent=Solution("turbo", "gone")))
    foreign, _ = tuned(device_tuner(never, bench=clock()), task=Task(SHAPE, incumbent=Solution("slow", "foreign")))

    assert (gone.winner is not None, statuses(gone)["gone"]) == (True, "unsupported")
    assert "foreign" not in [timing.solution.kernel_name for timing in foreign.timings]


def test_an_incumbent_in_the_paired_comparison_is_checked_again() -> None:
    """Slower in the race by more than a tie, it can still be the one that stays.

    Then it has to be right after the timing.
    """
    made = device_tuner(dies_at("check_again", "three"), bench=clock(three=10.5))

    outcome, _ = tuned(made, task=Task(SHAPE, incumbent=Solution("turbo", "three")))

    assert statuses(outcome)["three"] == "crashed"
    assert outcome.winner is not None
    assert outcome.winner.solution.kernel_name != "three"


def capped(among: dict[str, float], alone: dict[str, float], throttled: str = "power cap") -> Any:
    """Return a bench with times of kernels among others and alone; others take 10 us."""

    def bench(op: Any, shape: Shape, device: Any) -> Any:
        def sampler(launchers: Any, rounds: int) -> dict[Solution, Samples]:
            times = among if len(launchers) > 1 else alone
            taken = {solution: times.get(solution.kernel_name, 10.0) for solution in launchers}
            return {solution: Samples((us,) * rounds, calls=5000, throttled=throttled) for solution, us in taken.items()}

        return sampler

    return bench


@pytest.mark.parametrize(
    ("throttled", "alone", "wanted", "us"),
    [("", 10.2, "one", 9.8), ("power cap", 10.2, "three", 10.0), ("power cap", 10.0, "one", 10.0), ("heat", 10.2, "one", 9.8)],
)
def test_at_the_power_cap_a_winner_must_not_be_slower_alone(throttled: str, alone: float, wanted: str, us: float) -> None:
    """Faster among others but slower alone, it does not replace the incumbent.

    Its time is the one measured alone.
    """
    bench = capped({"one": 9.8}, {"one": alone}, throttled)

    outcome, _ = tuned(device_tuner(never, bench=bench), task=Task(SHAPE, incumbent=Solution("turbo", "three")))

    assert outcome.winner is not None
    assert (outcome.winner.solution.kernel_name, outcome.winner.us) == (wanted, us)
    times = {timing.solution.kernel_name: timing.us for timing in outcome.timings}
    assert times["one"] == (alone if throttled == "power cap" else 9.8)


def test_at_the_power_cap_the_next_fastest_gets_its_turn() -> None:
    """A guess that ties with the fastest but loses alone does not cost the others the shape."""
    outcome, _ = tuned(device_tuner(never, bench=capped({"one": 9.61, "two": 9.6}, {"one": 10.1, "two": 9.7})))

    assert outcome.winner is not None
    assert (outcome.winner.solution.kernel_name, outcome.winner.us) == ("two", 9.7)


def test_a_winner_is_checked_after_its_timing() -> None:
    """The fastest fails in its paired comparison.

    The solution chosen instead was too slow to be checked earlier.
    """
    checks: list[bool] = []

    def dies(request: Any) -> str:
        checked_again = request.method == "check_again"
        in_pair = request.method == "sample" and len(request.arguments[1]) <= 2 and concerns(request, "one") and any(checks)
        checks.append(checked_again)
        return "crashed" if in_pair or (checked_again and concerns(request, "two")) else ""

    outcome, _ = tuned(device_tuner(dies, bench=clock(one=9.0, two=9.4, three=9.5, native=9.3)))

    assert (statuses(outcome)["one"], statuses(outcome)["two"]) == ("crashed", "crashed")
    assert outcome.winner is not None
    assert outcome.winner.solution.kernel_name == "three"


def test_zero_means_no_limit() -> None:
    """--kernel_timeout 0 and --timeout 0 wait for ever, as AITER's 0 does."""
    seen: list[float] = []
    made = device_tuner(never, options=attrs.evolve(QUICK, timeout=0.0, kernel_timeout=0.0))
    worker = made.client.worker

    def noting(request: Any, *, timeout: float) -> Any:
        seen.append(timeout)
        return worker(request, timeout=timeout)

    made.client.worker = noting  # type: ignore[assignment]
    tuned(made)

    assert set(seen) == {0.0}


def test_after_the_deadline_only_the_minimum_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the budget spent in the middle of a shape, its finalists have one block of rounds."""
    monkeypatch.setattr("tunedgemm.tuner.device_tuner.LEAST_GRACE_S", 60.0)
    outcome, _ = tuned(device_tuner(never, options=attrs.evolve(QUICK, iters=101)), deadline=time.monotonic())

    assert outcome.winner is not None
    assert max(timing.samples for timing in outcome.timings) <= 16
