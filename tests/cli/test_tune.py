"""``tunedgemm tune``: flags that reach the tuner, messages after an interruption, exit codes."""

from __future__ import annotations

import os
import signal
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import tunedgemm.tuner
from tunedgemm import cli
from tunedgemm.device import Device
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.folders import table_paths
from tunedgemm.timing import Timing
from tunedgemm.tuner import Options
from tunedgemm.tuner.trial import Outcome, Place, Planned, Report, Step, Task

PLACE = Place(Device("sm_90", 132, "nvidia-h200", 0))
TASKS = tuple(Task(Shape("a16w16", m, 64, 128)) for m in (1, 2, 3))
#: every option with a value that is not its default, as flags
FLAGS = {
    "libtype": "--libtype triton,torch", "errRatio": "--errRatio 0.1", "atol": "--atol 0.1", "rtol": "--rtol 0.02",
    "deterministic": "--deterministic",
    "batch_invariant": "--batch-invariant", "cache": "--cache hot", "timing": "--timing eager", "warmup": "--warmup 2",
    "iters": "--iters 11", "candidates": "--candidates 32", "search": "--search full",
    "topk": "--topk 3", "seconds": "--seconds 1.5", "budget": "--budget 60",
    "whole": "--whole", "batch": "--batch 7", "timeout": "--timeout 20",
    "kernel_timeout": "--kernel_timeout 2", "all": "--all", "stale": "--stale", "resume": "--no-resume", "shard": "--shard 2/8",
    "sort": "--sort False", "jobs": "--jobs 3", "mp": "--mp 2", "device": "--device cpu", "executor": "--executor ray",
    "ray_address": "--ray-address ray://head:10001", "profile": "-o2 profile.csv",
}  # fmt: skip


def outcome(task: Task, us: float = 1.0) -> Outcome:
    winner = Timing(task.shape, Solution("triton", "fast"), us=us, status="ok") if us else None
    return Outcome(task, winner, None, (winner,) if winner else (), place=PLACE)


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Install a fake tuner that records its arguments,
    reports some outcomes and ends as requested."""

    def planted(*outcomes: Outcome, end: Callable[[], object] = lambda: None) -> dict[str, Any]:
        asked: dict[str, Any] = {}

        def tune(op, shapes, output, options, *, progress):
            asked.update(op=op, shapes=shapes, output=output, options=options)
            path = (*table_paths(output), tmp_path / "tuned.csv")[0]
            progress(None, Planned(TASKS, (), (PLACE,), path))
            for found in outcomes:
                progress(PLACE, Step(found.task, "time"))
                progress(PLACE, found)
            end()
            return Report((PLACE,), path, outcomes)

        monkeypatch.setattr(tunedgemm.tuner, "tune", tune)
        return asked

    return planted


def ctrl_c() -> None:
    raise KeyboardInterrupt


def test_every_option_is_a_flag(tuner, tmp_path: Path) -> None:
    """Every field of Options has a flag whose value arrives;
    without flags the defaults of Options hold."""
    assert set(FLAGS) == {field.name for field in attrs.fields(Options)}
    asked = tuner()
    assert cli.main(["tune"]) == 0
    assert asked == {"op": "a16w16", "shapes": None, "output": None, "options": Options()}

    (tmp_path / "in.csv").touch()
    words = " ".join(FLAGS.values()).split()
    assert cli.main(["tune", "-i", str(tmp_path / "in.csv"), "-o", str(tmp_path / "out.csv"), *words]) == 0
    given, default = attrs.asdict(asked["options"]), attrs.asdict(Options())
    assert [name for name in given if given[name] == default[name]] == []
    assert (given["shard"], given["sort"], given["resume"], given["profile"]) == ((2, 8), False, False, Path("profile.csv"))
    assert (asked["shapes"], asked["output"]) == (tmp_path / "in.csv", tmp_path / "out.csv")


def test_aiters_other_flags_are_accepted(tuner) -> None:
    """A command line written for AITER's tuner runs; the tuner always acts that way."""
    asked = tuner()

    words = ["--mp", "1", "--shape_grouped", "--splitK", "--with-hipblaslt", "--grouped-gemm", "--mxfp4-flydsl", "--sort", "-v"]
    assert cli.main(["tune", *words]) == 0
    assert asked["options"] == Options(mp=1)


def test_of_several_tables_the_first_is_written(tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    """-o A:B and GTUNE_TUNED reach the tuner as paths, the output first."""
    asked = tuner()
    assert cli.main(["tune", "-o", "a.csv:b.csv"]) == 0
    assert asked["output"] == (Path("a.csv"), Path("b.csv"))
    monkeypatch.setenv("GTUNE_TUNED", "c.csv")
    assert cli.main(["tune"]) == 0
    assert asked["output"] == Path("c.csv")


def test_last_tunes_one_shape(tuner, tmp_path: Path) -> None:
    """--last takes the last shape of the list, tuned or not; with --all it changes nothing, as in AITER."""
    asked, listed = tuner(), tmp_path / "in.csv"
    listed.write_text("M,N,K\n1,64,128\n2,64,128\n")

    assert cli.main(["tune", "-i", str(listed), "--last"]) == 0
    for shapes in (asked["shapes"].shapes, asked["shapes"].on(op_named("a16w16"), PLACE.device)):
        assert [row.shape.m for row in shapes] == [2]
    assert asked["options"].all
    assert cli.main(["tune", "-i", str(listed), "--last", "--all"]) == 0
    assert asked["shapes"] == listed


def test_failed_shapes_give_exit_code_1(tuner, capsys: pytest.CaptureFixture[str]) -> None:
    """0 where every shape has a winner, 1 where one has none; it is named."""
    tuner(outcome(TASKS[0]), outcome(TASKS[1]))
    assert cli.main(["tune"]) == 0

    tuner(outcome(TASKS[0]), outcome(TASKS[1], us=0))
    assert cli.main(["tune"]) == 1
    assert "failed: a16w16 M=2 N=64 K=128" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("end", "name", "code"),
    [(ctrl_c, "SIGINT", 130), (lambda: os.kill(os.getpid(), signal.SIGTERM), "SIGTERM", 143)],
    ids=["Ctrl-C", "SIGTERM"],
)
def test_an_interrupted_run_prints_how_to_resume(tuner, end, name, code, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message has the finished shapes, the path of their rows and the command that resumes; the
    exit code is the shell's."""
    tuner(outcome(TASKS[0]), outcome(TASKS[1], us=0), end=end)
    before = signal.getsignal(signal.SIGTERM)

    assert cli.main(["tune", "-o", str(tmp_path / "out.csv")]) == code

    err = capsys.readouterr().err
    assert f"tunedgemm: interrupted by {name}\n" in err and "Traceback" not in err
    assert f"2 of 3 shapes are done, 1 with a winner: kept in {tmp_path / 'out.csv'}, and every trial in its trial log" in err
    assert "the same command resumes\n" in err
    assert signal.getsignal(signal.SIGTERM) is before


def test_without_resume_the_hint_differs(tuner, capsys: pytest.CaptureFixture[str]) -> None:
    """--no-resume would throw the trials away again."""
    tuner(end=ctrl_c)

    assert cli.main(["tune", "--no-resume"]) == 130
    assert "without --no-resume it reuses the trials" in capsys.readouterr().err


def test_an_interruption_before_the_plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The message says that nothing was measured."""

    def tune(*arguments, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(tunedgemm.tuner, "tune", tune)

    assert cli.main(["tune"]) == 130
    assert capsys.readouterr().err == "tunedgemm: interrupted by SIGINT before anything was measured\n"


@pytest.fixture
def comparison(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Put a module in the place of `tunedgemm.analysis.compare` that notes what it is asked."""

    def planted(failed: bool) -> list[Any]:
        asked: list[Any] = []
        result = types.SimpleNamespace(failed=failed, left_out=())

        def run_config(op, source, table, options, *, progress):
            asked.append((op, source, table, options))
            progress(types.SimpleNamespace(shape=TASKS[0].shape, us=2.5, status="ok"))
            return result

        def compare(op, source, output, options, *, update, min_improvement_pct, progress):
            asked.append((op, source, output, options, update, min_improvement_pct))
            return result

        module = types.ModuleType("tunedgemm.analysis.compare")
        module.run_config, module.compare = run_config, compare
        module.print_checked = module.print_compared = lambda found, console: print("told", found is result, file=console.file)
        monkeypatch.setitem(sys.modules, "tunedgemm.analysis.compare", module)
        return asked

    return planted


@pytest.mark.parametrize("failed", [False, True])
def test_run_config_and_compare_are_passed_on(comparison, failed, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--run_config works with and without a table, --compare with and without --update_improved;
    failures give exit code 1."""
    asked, table, shapes = comparison(failed), tmp_path / "t.csv", tmp_path / "s.csv"
    table.touch()
    shapes.touch()

    codes = [
        cli.main(["tune", "--run_config", str(table)]),
        cli.main(["tune", "-i", str(shapes), "--run_config"]),
        cli.main(["tune", "--compare", "-i", str(shapes), "-o", str(table), "--iters", "7"]),
        cli.main(["tune", "--compare", "--update_improved", "--min_improvement_pct", "1.5"]),
    ]

    assert codes == [int(failed)] * 4
    assert asked == [
        ("a16w16", None, [table], Options()),
        ("a16w16", shapes, [], Options()),
        ("a16w16", shapes, table, Options(iters=7), False, 3.0),
        ("a16w16", None, None, Options(), True, 1.5),
    ]
    out = capsys.readouterr().out
    assert out.count("told True") == 4 and out.count("bf16->bf16: 2.50 us, ok\n") == 2


def test_an_interrupted_run_config_keeps_nothing(comparison, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An interrupted --run_config says that nothing is kept, and offers no resume."""
    comparison(failed=False)
    monkeypatch.setattr(sys.modules["tunedgemm.analysis.compare"], "run_config", lambda *_, **__: os.kill(os.getpid(), signal.SIGINT))

    assert cli.main(["tune", "--run_config"]) == 130
    assert capsys.readouterr().err == ("tunedgemm: interrupted by SIGINT; --run_config keeps nothing, and the tables are unchanged\n")


def test_an_interrupted_comparison_leaves_the_table(
    comparison, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message says that the table is unchanged, and names the candidate."""
    comparison(failed=False)

    def compare(op, source, output, options, *, progress, **more):
        progress(None, Planned(TASKS, (), (PLACE,), tmp_path / "candidate.csv"))
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["tunedgemm.analysis.compare"], "compare", compare)

    assert cli.main(["tune", "--compare"]) == 130
    assert (
        f"while tuning into {tmp_path / 'candidate.csv'}; the table is unchanged, and the same command resumes" in capsys.readouterr().err
    )
