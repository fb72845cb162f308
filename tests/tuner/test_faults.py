"""Faults: the good solution wins, and each fault is the status of one solution."""

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
@pytest.mark.parametrize(
    "kinds",
    [
        "hangs,segfaults,exits,last_tile_wrong,leaks,aborts_compiler,refuses,out_of_memory,wrong_later,good",
        pytest.param("", marks=pytest.mark.nightly),
    ],
    ids=["a kind of each", "all kinds"],
)
def test_each_fault_costs_its_solution_alone(
    faulty_plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kinds: str
) -> None:
    """Hangs, crashes, wrong results, leaks and broken compilers do not fail the run."""
    from faulty_backend import EXPECTED

    monkeypatch.setenv("FAULTY_KINDS", kinds)
    (tmp_path / "in.csv").write_text("M,N,K,bias,dtype,outdtype\n8,64,128,False,fp32,fp32\n")
    table, started = tmp_path / "t.csv", time.monotonic()

    code = main(
        f"tune -i {tmp_path / 'in.csv'} -o {table} --libtype faulty --iters 7 --warmup 1 --timeout 12 --kernel_timeout 6 -v".split()
    )

    out, found = capsys.readouterr().out, statuses(table)
    tried = kinds.split(",") if kinds else EXPECTED
    unexpected = {name: found.get(name) for name in tried if found.get(name) not in EXPECTED[name]}
    assert unexpected == {}, out
    assert code == 0
    assert winners(table) == ["faulty:good"]
    assert "hung" in out and "crashed" in out, "the summary counts what failed and why"
    assert time.monotonic() - started < 1000, "what sleeps for an hour is not waited for"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nondeterministic", "batch_variant"])
def test_options_exclude_solutions_whose_bits_vary(kind: str, faulty_plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--deterministic and --batch-invariant disqualify other bits at each call, or at another M."""
    from faulty_backend import PARTICULAR

    monkeypatch.setenv("FAULTY_KINDS", kind)  # alone, since on a busy machine screening drops any but the first

    tune(shapes=[SHAPE], output=tmp_path / "t.csv", options=attrs.evolve(LIMITS, deterministic=True, batch_invariant=True))

    assert statuses(tmp_path / "t.csv") == {kind: PARTICULAR[kind]}
    assert not (tmp_path / "t.csv").exists() or winners(tmp_path / "t.csv") == []


@pytest.mark.slow
def test_a_solution_with_the_same_bits_everywhere_wins_under_both_options(
    faulty_plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--deterministic and --batch-invariant leave such a solution, whose class gets the rows."""
    monkeypatch.setenv("FAULTY_KINDS", "good")

    tune(shapes=[SHAPE], output=tmp_path / "t.csv", options=attrs.evolve(LIMITS, deterministic=True, batch_invariant=True))

    assert set(winners(tmp_path / "t.csv")) == {"faulty:good"}


@pytest.mark.slow
def test_a_shape_without_a_solution_fails_and_the_next_is_tuned(
    faulty_plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 1, each solution has a reason, and the shapes before and after it have rows.

    Without options, solutions that vary are right.
    """
    from faulty_backend import PARTICULAR

    monkeypatch.setenv("FAULTY_KINDS", ",".join(["good", *PARTICULAR]))
    (tmp_path / "in.csv").write_text(
        "M,N,K,bias,dtype,outdtype\n8,64,128,False,fp32,fp32\n8,96,128,False,bf16,fp32\n8,128,128,False,fp32,fp32\n"
    )
    table = tmp_path / "t.csv"

    code = main(f"tune -i {tmp_path / 'in.csv'} -o {table} --libtype faulty --iters 3".split())

    out = capsys.readouterr().out
    assert code == 1
    assert [row.shape.n for row in read_rows(table, op_named("a16w16"))[0]] == [64, 128]
    assert "2 tuned, 1 failed" in out
    assert "of one dtype" in out, "the backend's reason"
    assert set(statuses(table).values()) <= {"ok", "screened"}
