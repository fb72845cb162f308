"""A run as a whole: bit classes, budgets, kinds of devices, and the results of an early end."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.dispatch.settings import Settings
from tunedgemm.errors import LibtypeError, TableError
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported
from tunedgemm.table.csvfile import read_rows
from tunedgemm.table.folders import home_folder
from tunedgemm.testing.fakes import fake_backend, fake_registry, with_hooks
from tunedgemm.testing.replay import read_trials
from tunedgemm.tuner import Options, tune
from tunedgemm.tuner.device_tuner import DeviceTuner
from tunedgemm.tuner.session import Session
from tunedgemm.tuner.trial import DeviceFault, Outcome, Samples, Task
from tunedgemm.tuner.worker_client import BudgetSpent

OP = op_named("a16w16")
#: In the order of the plan: the costliest first.
SHAPES = [Shape("a16w16", m, n, 128, "fp32") for m, n in ((1, 1024), (8, 512), (100, 64))]
#: One weight, whose rows are of one bit class.
GROUP = [Shape("a16w16", m, 64, 128, "fp32") for m in (1, 8, 100)]
QUICK = Options(libtype="turbo", iters=8, warmup=1)


def exact(solution: Solution, shape: Shape, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = (x.double() @ weight.double().t()).float()
    return out * (1.0 + 2.0**-20 * (x.shape[0] > 64)) if solution.kernel_name == "varies" else out


def clock(us: Mapping[tuple[str, int], float]) -> Any:
    """Times by kernel name and M."""

    def bench(op: Any, shape: Shape, device: Any) -> Any:
        return lambda launchers, rounds: {s: Samples((us.get((s.kernel_name, shape.m), 50.0),) * rounds) for s in launchers}

    return bench


def rows(path: Path) -> dict[int, str]:
    return {row.shape.m: row.solution.kernel_name for row in read_rows(path, OP)[0]}


def test_the_fastest_bit_class_gets_a_row_for_each_m_and_one_for_any(tmp_path: Path, cpu) -> None:
    """Its members may differ by M; kernels whose rows depend on M are in no class, with the reason."""
    names = ("varies", "small", "large", "steady")
    us = dict.fromkeys(itertools.product(names, (1, 8, 100)), 20.0)
    us |= {("varies", m): 1.0 for m in (1, 8, 100)}
    us |= {("small", 1): 1.8, ("small", 8): 1.8, ("small", 100): 30.0, ("large", 1): 40.0, ("large", 8): 40.0, ("large", 100): 1.9}
    registry = fake_registry(fake_backend("turbo", solutions=names, call=exact))
    table = tmp_path / "t.csv"

    options = attrs.evolve(QUICK, batch_invariant=True)
    report = tune(shapes=GROUP, output=table, options=options, registry=registry, bench=clock(us))

    assert rows(table) == {0: "small", 1: "small", 8: "small", 100: "large"}
    [chosen] = report.classes
    assert {row.bit_class for row in read_rows(table, OP)[0]} == {chosen.classes[0].label}
    assert (chosen.classes[0].kernels, chosen.classes[0].libtypes) == (2, ("turbo",))
    assert chosen.classes[0].cost == pytest.approx((1.8 + 1.8 + 1.9) / 3.0)
    trials = [trial for trial in read_trials(table.with_name("t.trials.jsonl")) if trial.shape.m == 0]
    assert {trial.solution.kernel_name: trial.status for trial in trials} == {"varies": "batch_variant", "small": "ok", "large": "ok"}
    assert "at M = " in next(trial.detail for trial in trials if trial.status == "batch_variant")
    dispatcher = Dispatcher(OP, registry, above=(table,), settings=Settings(batch_invariant=True))
    served = {m: dispatcher.explain(attrs.evolve(GROUP[0], m=m), cpu).offer for m in (1, 37, 100, 5000)}
    assert {m: offer.solution.kernel_name for m, offer in served.items()} == {1: "small", 37: "large", 100: "large", 5000: "large"}
    assert {offer.bit_class for offer in served.values()} == {chosen.classes[0].label}
    assert len(tune(shapes=GROUP, output=table, options=options, registry=registry, bench=clock(us)).skipped) == 3


def test_a_kernel_is_in_the_class_of_a_later_one_for_every_m(tmp_path: Path) -> None:
    """Its bits were given up, since it refuses large M, and are measured again: it is the fastest."""

    def call(solution: Solution, shape: Shape, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = exact(solution, shape, x, weight)
        return out if solution.kernel_name == "first" else out * (1.0 + 2.0**-20)

    def bind(solution: Solution, shape: Shape, device: Any) -> Any:
        few = solution.kernel_name == "few" and shape.m > 512
        return Unsupported("few rows only") if few else backend.hooks.bind(solution, shape, device)

    backend = fake_backend("turbo", solutions=("first", "few", "every"), call=call)
    us = {("first", 1): 10.0, ("few", 1): 11.0, ("every", 1): 12.0, ("first", 8): 19.0, ("few", 8): 10.0, ("every", 8): 19.0}
    table, options = tmp_path / "t.csv", attrs.evolve(QUICK, batch_invariant=True)
    tune(shapes=GROUP[:2], output=table, options=options, registry=fake_registry(with_hooks(backend, bind=bind)), bench=clock(us))

    assert rows(table) == {0: "every", 1: "few", 8: "few"}


def test_classes_have_a_table_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default is in the user folder; a table that the op's variable names must not have other rows."""
    registry, options = fake_registry(fake_backend("turbo", solutions=("steady",), call=exact)), attrs.evolve(QUICK, batch_invariant=True)
    report = tune(shapes=GROUP[:1], options=options, registry=registry, bench=clock({}))
    plain = tune(shapes=GROUP[:1], options=QUICK, registry=registry, bench=clock({}))
    monkeypatch.setenv(OP.columns.variable, str(plain.output))

    assert report.output == home_folder() / "batch_invariant" / OP.columns.tuned_file != plain.output
    with pytest.raises(TableError, match=r"a row of no bit class.* -o"):
        tune(shapes=GROUP[:1], options=options, registry=registry, bench=clock({}))


def test_a_group_with_a_failed_m_has_no_class_and_says_so(tmp_path: Path) -> None:
    """No row is written for its other M, so the reason names the M at which no kernel passed."""

    def supports(shape: Shape, device: Any) -> Unsupported | None:
        return Unsupported("too large") if shape.m > 64 else None

    registry = fake_registry(fake_backend("turbo", solutions=("steady",), call=exact, supports=supports))
    options, table = attrs.evolve(QUICK, batch_invariant=True), tmp_path / "t.csv"
    report = tune(shapes=GROUP, output=table, options=options, registry=registry, bench=clock({}))

    assert [(chosen.shape, chosen.reason) for chosen in report.classes] == [(GROUP[0].with_m(0), "no kernel passed at M = 100")]
    assert [outcome.task.shape.m for outcome in report.failed] == [100]
    assert not table.exists()


def test_a_group_that_was_not_finished_gets_no_class_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class counts as tuned for every M, so that of a partly measured group would be final."""
    us = dict.fromkeys(itertools.product(("small", "large"), (1, 8, 100)), 20.0) | {("small", 1): 4.0, ("large", 100): 4.0}
    registry = fake_registry(fake_backend("turbo", solutions=("small", "large"), call=exact))
    table, options = tmp_path / "t.csv", attrs.evolve(QUICK, batch_invariant=True)
    clocked: list[Any] = [clock(us)]

    def bench(op: Any, shape: Shape, device: Any) -> Any:
        return clocked[-1](op, shape, device)

    def lose(_: Any, event: Any) -> None:
        if isinstance(event, Outcome):
            clocked.append(lost)

    def lost(op: Any, shape: Shape, device: Any) -> Any:
        monkeypatch.setattr(Session, "place", lost_place)
        raise DeviceFault("gone")

    def lost_place(session: Session) -> Any:
        raise RuntimeError("no device")

    place = Session.place
    first = tune(shapes=GROUP, output=table, options=options, registry=registry, bench=bench, progress=lose)
    assert (first.classes, bool(first.lost), table.exists()) == ((), True, False)
    clocked.append(clock(us))
    monkeypatch.setattr(Session, "place", place)
    second = tune(shapes=GROUP, output=table, options=options, registry=registry, bench=bench)

    assert [chosen.shape.m for chosen in second.classes] == [0]
    assert second.lost == ()


def test_finished_groups_have_their_class_when_a_budget_is_spent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are left to the next run, which keeps the class."""
    tune_one, others = DeviceTuner.tune, [attrs.evolve(shape, n=32) for shape in GROUP]

    def tuned(tuner: DeviceTuner, task: Task, *arguments: Any) -> None:
        if task.shape.n == 32 and task.shape.m < 100:
            raise BudgetSpent("the budget leaves no time for all candidates")
        tune_one(tuner, task, *arguments)

    registry, table = fake_registry(fake_backend("turbo", solutions=("steady",), call=exact)), tmp_path / "t.csv"
    options = attrs.evolve(QUICK, batch_invariant=True, budget=600.0)
    with monkeypatch.context() as patch:
        patch.setattr(DeviceTuner, "tune", tuned)
        first = tune(shapes=[*GROUP, *others], output=table, options=options, registry=registry, bench=clock({}))
    stored = {(row.shape.n, row.shape.m) for row in read_rows(table, OP)[0]}
    second = tune(shapes=[*GROUP, *others], output=table, options=options, registry=registry, bench=clock({}))

    assert [chosen.shape.n for chosen in first.classes] == [64] and stored == {(64, m) for m in (0, 1, 8, 100)}
    assert {shape.n for shape in first.unbegun} == {32} and first.lost == ()
    assert [chosen.shape.n for chosen in second.classes] == [32] and {shape.n for shape in second.skipped} == {64}


def test_stale_rows_are_tuned_again_though_an_interrupted_run_had_done_them(tmp_path: Path) -> None:
    """Rows of another library version, of a libtype that is gone, or of AITER, which tells no
    version; others stay.
    """
    one = fake_backend("turbo", solutions=("steady",), call=exact)
    table = tmp_path / "t.csv"
    old = fake_registry(with_hooks(one, library_version=lambda: "1"))
    new = fake_registry(with_hooks(one, library_version=lambda: "2"))

    def interrupt(_: Any, event: Any) -> None:
        if isinstance(event, Outcome) and event.task.shape.m == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(shapes=SHAPES, output=table, options=QUICK, registry=old, bench=clock({}), progress=interrupt)
    text = table.read_text()
    assert {row.libver for row in read_rows(table, OP)[0]} == {"1"}
    report = tune(output=table, options=attrs.evolve(QUICK, stale=True), registry=new, bench=clock({("steady", 1): 7.0}))
    again = tune(output=table, options=attrs.evolve(QUICK, stale=True), registry=new, bench=clock({}))

    assert [outcome.task.shape.m for outcome in report.outcomes] == [1, 8]
    assert {(row.shape.m, row.libver, row.us) for row in read_rows(table, OP)[0]} == {(1, "2", 7.0), (8, "2", 50.0)}
    assert again.outcomes == ()
    table.write_text(text.replace("turbo", "departed"))
    tune(output=table, options=attrs.evolve(QUICK, stale=True), registry=new, bench=clock({}))
    assert {row.solution.libtype for row in read_rows(table, OP)[0]} == {"turbo"}


def test_a_shape_that_the_rest_of_a_budget_cannot_hold_is_left_to_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a run says that its budget is spent, not that a device was lost."""
    tune_one = DeviceTuner.tune

    def tuned(tuner: DeviceTuner, task: Task, *arguments: Any) -> None:
        if tuner.finished:
            raise BudgetSpent("the budget leaves no time for all candidates")
        tune_one(tuner, task, *arguments)

    monkeypatch.setattr(DeviceTuner, "tune", tuned)
    registry = fake_registry(fake_backend("turbo", solutions=("steady",), call=exact))

    report = tune(shapes=SHAPES, output=tmp_path / "t.csv", options=attrs.evolve(QUICK, budget=600.0), registry=registry, bench=clock({}))

    assert len(report.outcomes) == 1
    assert len(report.unbegun) == len(SHAPES) - 1
    assert report.lost == ()


def test_shapes_without_a_working_device_are_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the last device stops working, the run ends with a message, and the next run resumes."""
    state, place = {"gone": False, "mended": False}, Session.place

    def bench(op: Any, shape: Shape, device: Any) -> Any:
        if shape.m == 8 and not state["mended"]:
            state["gone"] = True
            raise DeviceFault("an illegal address")
        return clock({})(op, shape, device)

    def placed(session: Session) -> Any:
        if state["gone"]:
            raise RuntimeError("no CUDA-capable device is detected")
        return place(session)

    monkeypatch.setattr(Session, "place", placed)
    registry, table = fake_registry(fake_backend("turbo", solutions=("steady",), call=exact)), tmp_path / "t.csv"

    first = tune(shapes=SHAPES, output=table, options=QUICK, registry=registry, bench=bench)
    state.update(gone=False, mended=True)
    second = tune(shapes=SHAPES, output=table, options=QUICK, registry=registry, bench=bench)

    assert [shape.m for shape in first.lost] == [8, 100]
    assert [outcome.task.shape.m for outcome in first.outcomes] == [1]
    assert sorted(outcome.task.shape.m for outcome in second.outcomes) == [8, 100]


def test_shapes_that_failed_before_the_interruption_stay_failed_until_the_run_has_ended(tmp_path: Path) -> None:
    """The resumed run counts them with the reason, and the next new run tries again."""
    broken = {"value": True}

    def call(solution: Solution, shape: Shape, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return exact(solution, shape, x, weight) * (2.0 if broken["value"] and shape.m == 1 else 1.0)

    registry, table = fake_registry(fake_backend("turbo", solutions=("steady",), call=call)), tmp_path / "t.csv"

    def interrupt(_: Any, event: Any) -> None:
        if isinstance(event, Outcome) and event.task.shape.m == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(shapes=SHAPES, output=table, options=QUICK, registry=registry, bench=clock({}), progress=interrupt)
    broken["value"] = False
    second = tune(shapes=SHAPES, output=table, options=QUICK, registry=registry, bench=clock({}))
    third = tune(shapes=SHAPES, output=table, options=QUICK, registry=registry, bench=clock({}))

    assert [(outcome.task.shape.m, "--no-resume" in outcome.reason) for outcome in second.failed] == [(1, True)]
    assert [outcome.task.shape.m for outcome in third.outcomes] == [1]
    assert set(rows(table)) == {1, 8, 100}


def test_an_op_without_a_backend_is_an_error_at_once(tmp_path: Path) -> None:
    """The error lists the installed backends and their ops."""
    registry = fake_registry(fake_backend("other", ops=("relu16",)))

    with pytest.raises(LibtypeError, match="no backend of --libtype other covers the op a16w16: other covers relu16"):
        tune(shapes=SHAPES, output=tmp_path / "t.csv", options=Options(libtype="other"), registry=registry)
