"""The tuner as a whole, on the CPU, with backends that behave badly and one that does not."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import torch
from tunedgemm.errors import LibtypeError, TableError, UserError
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import read_rows
from tunedgemm.testing.fakes import fake_backend, fake_registry, with_hooks
from tunedgemm.testing.replay import Replay, read_trials
from tunedgemm.timing import Timing
from tunedgemm.tuner import Options, tune
from tunedgemm.tuner.trial import Samples

OP = op_named("a16w16")
SHAPES = [Shape("a16w16", m, 64, 128, "fp32") for m in (1, 9)]
QUICK = Options(libtype="turbo", iters=5, warmup=1)


def linear(solution, shape, x, weight, bias=None):
    return torch.nn.functional.linear(x, weight, bias)


def rows(path: Path) -> dict[int, str]:
    return {row.shape.m: str(row.solution) for row in read_rows(path, OP)[0]}


def test_every_candidate_ends_with_a_status_and_the_good_one_wins(tmp_path: Path) -> None:
    """Raising, wrong and slow solutions cost only themselves, and the log has the status of each."""

    def call(solution, shape, x, weight):
        if solution.kernel_name == "raises":
            raise RuntimeError("boom")
        if solution.kernel_name == "zeros":
            return x.new_zeros(x.shape[0], weight.shape[0])
        return linear(solution, shape, x, weight)

    backend = fake_backend("turbo", solutions=("raises", "zeros", "slow", "good"), call=call, sleep={"slow": 1e-3})
    report = tune(shapes=SHAPES, output=tmp_path / "t.csv", options=QUICK, registry=fake_registry(backend))

    assert rows(tmp_path / "t.csv") == {1: "turbo:good", 9: "turbo:good"}
    trials = read_trials(tmp_path / "t.trials.jsonl")
    found = {t.solution.kernel_name: t.status for t in trials if t.shape == SHAPES[0] and t.solution.libtype == "turbo"}
    assert found == {"raises": "failed", "zeros": "wrong", "slow": "ok", "good": "ok"}
    assert report.failed == []
    assert all(outcome.baseline is not None and outcome.baseline.us > 0 for outcome in report.outcomes)


def test_tuned_shapes_are_skipped_until_all(tmp_path: Path) -> None:
    """A second run measures nothing; --all measures again and ties keep the incumbent."""
    registry, path = fake_registry(fake_backend("turbo", solutions=("a", "b"), call=linear)), tmp_path / "t.csv"
    tune(shapes=SHAPES[:1], output=path, options=QUICK, registry=registry)
    first = rows(path)

    second = tune(shapes=SHAPES, output=path, options=QUICK, registry=registry)
    third = tune(shapes=SHAPES, output=path, options=Options(libtype="turbo", iters=5, all=True), registry=registry)

    assert [outcome.task.shape.m for outcome in second.outcomes] == [9]
    assert len(third.outcomes) == 2
    incumbents = {outcome.task.shape.m: outcome.task.incumbent for outcome in third.outcomes}
    assert incumbents[1] == Solution("turbo", first[1].split(":")[1])


def test_the_report_says_what_an_empty_list_needs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A backend without kernels costs no warning; its reason is that of a row without a name."""
    bare = with_hooks(fake_backend("bare", solutions=()), lacks=lambda: "no nvcc")
    registry = fake_registry(bare, fake_backend("turbo", call=linear))
    options = attrs.evolve(QUICK, libtype="bare,turbo")
    (outcome,) = tune(shapes=SHAPES[:1], output=tmp_path / "t.csv", options=options, registry=registry).outcomes
    assert outcome.refusals == (("bare", "no nvcc"),) and not caplog.records


def test_a_backend_that_breaks_the_contract_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A foreign solution costs the backend its place in that shape, with a warning, and the run
    goes on.
    """
    foreign = fake_backend("foreign", solutions=(Solution("torch", "native"),))
    registry = fake_registry(foreign, fake_backend("turbo", call=linear))

    tune(shapes=SHAPES[:1], output=tmp_path / "t.csv", options=Options(iters=3), registry=registry)

    assert "returned a foreign solution" in caplog.text
    assert rows(tmp_path / "t.csv")


def test_torch_is_stored_only_if_libtype_includes_it(tmp_path: Path) -> None:
    """With --libtype all a table is never slower than torch.

    With one libtype the row is that libtype's.
    """
    registry = fake_registry(fake_backend("turbo", solutions=("slow",), call=linear, sleep={"slow": 2e-3}))

    tune(shapes=SHAPES[:1], output=tmp_path / "all.csv", options=Options(iters=5), registry=registry)
    report = tune(shapes=SHAPES[:1], output=tmp_path / "turbo.csv", options=QUICK, registry=registry)

    assert rows(tmp_path / "all.csv")[1].startswith("torch:")
    assert rows(tmp_path / "turbo.csv")[1] == "turbo:slow"
    assert report.outcomes[0].gain < 1


def test_refinement_finds_a_neighbour_that_was_not_listed(tmp_path: Path) -> None:
    """The screen asks for the neighbours of the best and times them like the others."""
    both = fake_backend("turbo", solutions=("listed", "better"), call=linear, sleep={"listed": 2e-3})

    def refine(solution):
        return [Solution("turbo", "better")] if solution.kernel_name == "listed" else []

    backend = with_hooks(both, enumerate_solutions=lambda: [Solution("turbo", "listed")], refine=refine)
    report = tune(shapes=SHAPES[:1], output=tmp_path / "t.csv", options=QUICK, registry=fake_registry(backend))

    assert str(report.outcomes[0].winner.solution) == "turbo:better"


def test_a_broken_refine_costs_the_neighbours_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An exception while the neighbours are listed is logged.

    The listed solutions are tuned all the same.
    """

    def refine(solution, shape, device):
        raise ValueError("no such ladder")

    backend = fake_backend("turbo", solutions=("listed",), call=linear)
    registry = fake_registry(with_hooks(backend, refine=refine))

    tune(shapes=SHAPES[:1], output=tmp_path / "t.csv", options=QUICK, registry=registry)

    assert rows(tmp_path / "t.csv") == {1: "turbo:listed"}
    assert "no such ladder" in caplog.text


def test_the_winner_must_beat_torch_alone_too(tmp_path: Path) -> None:
    """A solution that is faster only while many others run does not displace F.linear."""

    def bench(op, shape, device):
        def sample(launchers, rounds):
            crowded = len(launchers) > 2
            us = {"native": 10.0 if crowded else 8.0, "a": 9.0, "b": 9.5}
            return {solution: Samples((us.get(solution.kernel_name, 99.0),) * rounds) for solution in launchers}

        return sample

    registry = fake_registry(fake_backend("turbo", solutions=("a", "b"), call=linear))

    [outcome] = tune(shapes=SHAPES[:1], output=tmp_path / "t.csv", options=Options(iters=21), registry=registry, bench=bench).outcomes

    assert str(outcome.winner.solution) == "torch:native"
    assert outcome.winner.us == 8.0


def test_a_replayed_log_gives_the_same_table_again(tmp_path: Path) -> None:
    """The same times give the same winners, without measuring."""
    log = tmp_path / "log.jsonl"
    times = {(1, "a"): 5.0, (1, "b"): 4.0, (9, "a"): 6.0, (9, "b"): 8.0}
    trials = [Timing(s, Solution("turbo", name), "ok", us=times[s.m, name], samples=9) for s in SHAPES for name in "ab"]
    log.write_text("".join(trial.to_json() + "\n" for trial in trials))
    registry = fake_registry(fake_backend("turbo", solutions=("a", "b"), call=linear))

    tune(shapes=SHAPES, output=tmp_path / "t.csv", options=QUICK, registry=registry, bench=Replay(log))

    assert rows(tmp_path / "t.csv") == {1: "turbo:b", 9: "turbo:a"}
    assert [row.us for row in read_rows(tmp_path / "t.csv", OP)[0]] == [4.0, 6.0]


def test_usage_errors_come_before_anything_is_measured(tmp_path: Path) -> None:
    """Unknown libtypes, unusable folders, missing inputs and invalid options are named."""
    registry, blocked = fake_registry(), tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(LibtypeError, match="no backend of that name; installed: torch"):
        tune(shapes=SHAPES, output=tmp_path / "t.csv", options=Options(libtype="nope"), registry=registry)
    with pytest.raises(LibtypeError, match=r"pip install tunedgemm\[asm\]"):
        tune(shapes=SHAPES, output=tmp_path / "t.csv", options=Options(libtype="asm"), registry=registry)
    with pytest.raises(TableError, match="cannot write"):
        tune(shapes=SHAPES, output=blocked / "t.csv", registry=registry)
    with pytest.raises(TableError, match="AITER_TUNE_GEMM=1"):
        tune(output=tmp_path / "t.csv", registry=registry)
    with pytest.raises(UserError, match="--iters"):
        Options(iters=0)
    assert not (tmp_path / "t.csv").exists()
