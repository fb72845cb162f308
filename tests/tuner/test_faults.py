"""Faults: whatever a solution does to its process, the good one wins, and each other has a status of its own."""

from __future__ import annotations

import time
from pathlib import Path

import attrs
import pytest
from tunedgemm.cli import main
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.table.csvfile import read_rows
from tunedgemm.testing.replay import read_trials
from tunedgemm.tuner import Options, tune

SHAPE = Shape("a16w16", 8, 64, 128, "fp32")
#: Limits far above what a right solution needs here, and short enough to wait for.
LIMITS = Options(libtype="faulty", iters=7, warmup=1, timeout=6, kernel_timeout=3)


def winners(table: Path) -> list[str]:
    return [str(row.solution) for row in read_rows(table, op_named("a16w16"))[0]]


def statuses(table: Path) -> dict[str, str]:
    trials = [trial for trial in read_trials(table.with_suffix(".trials.jsonl")) if trial.solution.libtype == "faulty"]
    assert len({(trial.shape, trial.solution) for trial in trials}) == len(trials), "a solution has two final trials"
    return {trial.solution.kernel_name: trial.status for trial in trials}


@pytest.mark.slow
@pytest.mark.timing
def test_each_fault_costs_its_solution_alone(faulty_plugin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Hangs, crashes, wrong results, leaks and broken compilers: the run ends with exit code 0 and the good one in the table."""
    from faulty_backend import EXPECTED

    (tmp_path / "in.csv").write_text("M,N,K,bias,dtype,outdtype\n8,64,128,False,fp32,fp32\n")
    table, started = tmp_path / "t.csv", time.monotonic()

    code = main(f"tune -i {tmp_path / 'in.csv'} -o {table} --libtype faulty --iters 7 --warmup 1 --timeout 6 --kernel_timeout 3 -v".split())

    out, found = capsys.readouterr().out, statuses(table)
    unexpected = {name: found.get(name) for name, words in EXPECTED.items() if found.get(name) not in words}
    assert unexpected == {}, out
    assert code == 0
    assert winners(table) == ["faulty:good"]
    assert "hung" in out and "crashed" in out, "the summary counts what failed and why"
    assert time.monotonic() - started < 1000, "what sleeps for an hour is not waited for"


@pytest.mark.slow
def test_only_what_is_asked_for_by_name_costs_solutions_that_vary(
    faulty_plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other bits at each call, or at another M, disqualify with --deterministic or --batch-invariant, and only then."""
    from faulty_backend import PARTICULAR

    monkeypatch.setenv("FAULTY_KINDS", ",".join(["good", *PARTICULAR]))
    plain, strict = tmp_path / "plain.csv", tmp_path / "strict.csv"

    tune(shapes=[SHAPE], output=plain, options=LIMITS)
    tune(shapes=[SHAPE], output=strict, options=attrs.evolve(LIMITS, deterministic=True, batch_invariant=True))

    assert set(statuses(plain).values()) <= {"ok", "screened"}
    assert statuses(strict) == {"good": "ok", **PARTICULAR}
    assert set(winners(strict)) == {"faulty:good"}


@pytest.mark.slow
def test_a_shape_that_nothing_can_run_fails_and_the_next_is_tuned(
    faulty_plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, the reason of each solution, no row; shapes before and after it have theirs."""
    monkeypatch.setenv("FAULTY_KINDS", "good")
    (tmp_path / "in.csv").write_text(
        "M,N,K,bias,dtype,outdtype\n8,64,128,False,fp32,fp32\n8,96,128,False,bf16,fp32\n8,128,128,False,fp32,fp32\n"
    )
    table = tmp_path / "t.csv"

    code = main(f"tune -i {tmp_path / 'in.csv'} -o {table} --libtype faulty --iters 3".split())

    out = capsys.readouterr().out
    assert code == 1
    assert [row.shape.n for row in read_rows(table, op_named("a16w16"))[0]] == [64, 128]
    assert "2 tuned, 1 failed" in out
    assert "of one dtype" in out, "the backend's own reason"


@pytest.mark.slow
def test_where_every_solution_faults_the_shape_fails_and_the_run_ends(
    faulty_plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but faults, with as many workers lost in a row as there are solutions: a failed shape, and no endless replacing."""
    monkeypatch.setenv("FAULTY_KINDS", "segfaults,aborts,segfaults_later")

    report = tune(shapes=[SHAPE], output=tmp_path / "t.csv", options=LIMITS)

    assert [outcome.task.shape for outcome in report.failed] == [SHAPE]
    assert set(statuses(tmp_path / "t.csv").values()) == {"crashed"}
    assert winners(tmp_path / "t.csv") == [] if (tmp_path / "t.csv").exists() else True
