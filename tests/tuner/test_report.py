"""The display and the summary of a run.

One line a shape in a file, a display in a terminal of any width, and the summary.
"""

from __future__ import annotations

import io
import sys
import threading
from pathlib import Path

import attrs
import pytest
from tunedgemm.device import Device
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.text.console import Console
from tunedgemm.timing import STATUSES, Timing
from tunedgemm.tuner.progress import Progress
from tunedgemm.tuner.report import console, summary
from tunedgemm.tuner.trial import ChosenClass, ClassCost, Outcome, Place, Planned, Report, Step, Task, Trials

TABLE = Path("folder/bf16_tuned_gemm.csv")
FAST, TORCH = Solution("triton", "fast_[bold]v3", 4), Solution("torch", "native")
TASKS = tuple(Task(Shape("a16w16", 1 << i, 1280, 8192), count=1 + i) for i in range(6))


def gpu(index: int, node: str = "") -> Place:
    return Place(Device("sm_90", 132, "nvidia-h200", index), node)


GPUS = tuple(map(gpu, range(4)))


def timed(task: Task, solution: Solution, status: str = "ok", us: float = 0.0, **more: object) -> Timing:
    return Timing(task.shape, solution, status, us=us, **more)


def outcome(task: Task, us: float = 10.0, torch_us: float = 20.0, others: tuple[Timing, ...] = (), **more: object) -> Outcome:
    """A shape that FAST won, or that failed where *us* is 0."""
    winner, reference = timed(task, FAST, us=us, noise=0.004) if us else None, timed(task, TORCH, us=torch_us)
    return Outcome(task, winner, reference, (*([winner] if winner else []), reference, *others), **more)


def told(width: int = 120, **more: object) -> Console:
    return Console(file=io.StringIO(), width=width, **more)


def terminal(width: int = 120, height: int = 30) -> Console:
    return told(width, height=height, force_terminal=True, color_system=None, _environ={"TERM": "xterm"})


def shown(progress: Progress, output: Console) -> list[str]:
    """Return the lines of the current display."""
    with output.capture() as capture:
        output.print(progress.display())
    return capture.get().splitlines()


def summarized(report: Report, *, verbose: bool = False, width: int = 160) -> str:
    output = told(width)
    summary(report, verbose, output)
    return output.file.getvalue()


def test_a_file_gets_one_line_a_shape() -> None:
    """Steps print nothing there.

    A line has the number, the shape, the winner, its time and gain, and is never wrapped.
    """
    output = told(40)
    with Progress(output=output) as progress:
        progress(None, Planned(TASKS, (), GPUS[:1], TABLE))
        progress(GPUS[0], Step(TASKS[0], "check", FAST))
        progress(GPUS[0], Trials(TASKS[0], ()))
        progress(GPUS[0], outcome(TASKS[0], tied=2))
        progress(GPUS[0], outcome(TASKS[1], us=0, others=(timed(TASKS[1], FAST, "hung"),)))

    assert output.file.getvalue().splitlines() == [
        "1/6 a16w16 M=1 N=1280 K=8192 bf16->bf16: triton:fast_[bold]v3 splitK=4 10.00 us, 2.00x torch, 2 tied",
        "2/6 a16w16 M=2 N=1280 K=8192 bf16->bf16: no solution passed (1 hung; torch is right, but not in --libtype)",
    ]


def test_verbose_lines_have_every_solution(capsys: pytest.CaptureFixture[str]) -> None:
    """Each solution's time, status and reason follow its shape, on one line each, with the seconds."""
    with Progress(verbose=True) as progress:
        others = (timed(TASKS[0], Solution("triton", "bad"), "failed", detail="RuntimeError: a\nb"),)
        progress(GPUS[0], outcome(TASKS[0], others=others, seconds=(("compile", 1.25), ("time", 2.0))))

    out = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()) for line in out[1:]] == [
        "10.00 us ok triton:fast_[bold]v3 splitK=4",
        "20.00 us ok torch:native",
        "failed triton:bad RuntimeError: a b",
        "seconds: compile 1.2, time 2.0",
    ]


def test_the_share_of_the_expected_saving_is_shown() -> None:
    """With a budget, the status has the finished shapes' share of the expected saving."""
    tasks = [attrs.evolve(task, saving=saving) for task, saving in zip(TASKS, (60.0, 30.0, 10.0), strict=False)]
    with Progress(output=told()) as progress:
        progress(None, Planned(tuple(tasks), (), GPUS, TABLE))
        assert "0 % of the expected saving" in progress.status()
        for task, share in zip(tasks, (60, 90, 100), strict=True):
            progress(GPUS[0], outcome(task))
            assert f" · 2.00x torch so far · {share} % of the expected saving · " in progress.status()


def test_the_display_shows_progress_and_busy_devices() -> None:
    """The display has shapes done, busy GPUs, gain, elapsed and remaining time.

    Per GPU its shape, activity, solution, best so far and its gain.
    """
    output = terminal()
    progress = Progress(output=output)
    progress(None, Planned(TASKS, (), GPUS, TABLE))
    progress(GPUS[0], Step(TASKS[0], "check", FAST))
    progress(GPUS[0], outcome(TASKS[0]))
    progress(GPUS[2], Step(TASKS[1], "screen", FAST))
    progress(GPUS[1], Step(TASKS[2], "time", None, (FAST, 12.5), 25.0))

    text = shown(progress, output)

    assert text[1].startswith("1 of 6 shapes · 2 of 4 GPUs busy · 2.00x torch so far · 0:00 elapsed, about 0:00 left")
    rows = [" ".join(line.split()) for line in text[2:]]
    assert rows == [
        "GPU 1 M=4 N=1280 K=8192 bf16 timing, best triton:fast_[bold]v3 splitK=4 12.50 us 2.00x",
        "GPU 2 M=2 N=1280 K=8192 bf16 screening triton:fast_[bold]v3 splitK=4",
        "GPU 0 idle",
        "GPU 3 idle",
    ]


def test_the_display_before_the_plan() -> None:
    """Until the devices have begun, the display is one line without counts."""
    output = terminal()
    assert shown(Progress(output=output), output) == ["starting · 0:00 elapsed"]


def test_equal_gpus_have_different_lines() -> None:
    """GPUs that differ only in index or node have a row each.

    Nodes are named where there are several.
    """
    output = terminal()
    progress = Progress(output=output)
    places = (gpu(0, "alpha"), gpu(1, "alpha"), gpu(0, "beta"))
    for place, task in zip(places, TASKS, strict=False):
        progress(place, Step(task, "compile"))

    text = "\n".join(shown(progress, output))

    assert "3 of 3 GPUs busy" in text
    assert all(label in text for label in ("alpha GPU 0", "alpha GPU 1", "beta GPU 0"))


def test_a_moved_shape_is_shown_once() -> None:
    """A device that was lost with its shape is idle once another has the shape, and when it is done
    there.
    """
    output = terminal()
    progress = Progress(output=output)
    progress(GPUS[0], Step(TASKS[0], "time"))
    progress(GPUS[1], Step(TASKS[0], "list"))
    assert "1 of 2 GPUs busy" in shown(progress, output)[1]

    progress(GPUS[1], outcome(TASKS[0]))
    assert "0 of 2 GPUs busy" in shown(progress, output)[1]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_the_display_fits_any_terminal(width: int) -> None:
    """No line is wider than the terminal, no more rows than it has, and each GPU's row stays one
    line.
    """
    output = terminal(width, height=12)
    progress = Progress(output=output)
    places = tuple(map(gpu, range(32)))
    progress(None, Planned(TASKS, (), places, TABLE))
    for place in places:
        task = Task(Shape("a16w16", 1 + place.device.index, 57344, 8192))
        progress(place, Step(task, "time", Solution("triton", "x" * 150), (FAST, 123456.78), 234567.89))

    text = shown(progress, output)

    assert max(map(len, text)) <= width
    assert sum(line.startswith("GPU") for line in text) == 7
    assert text[-1].startswith("...") and len(text) <= 8 + 1 + 5


def test_retimed_solutions_do_not_count_as_shapes() -> None:
    """Solutions retimed for a bit class are not counted or printed as shapes.

    Shapes of an earlier run are counted, with no time.
    """
    output = told()
    progress = Progress(output=output)
    progress(None, Planned(TASKS, (), GPUS, TABLE))
    progress(GPUS[0], outcome(TASKS[0]))
    progress(GPUS[0], Step(attrs.evolve(TASKS[0], only=(FAST,)), "time"))
    progress(GPUS[0], outcome(attrs.evolve(TASKS[0], only=(FAST,))))
    progress(GPUS[0], Outcome(TASKS[1], None, None, reason="it failed before"))

    assert [line[:3] for line in output.file.getvalue().splitlines()] == ["1/6", "2/6"]
    assert "no solution passed (it failed before)" in output.file.getvalue()
    assert len(progress.outcomes) == 2 and progress.left(0.0) is None


def test_time_left_is_estimated_from_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate is the mean time of a shape times the waiting ones, over the busy devices;
    never more than the budget.

    Unknown at first.
    """
    clock = [100.0]
    monkeypatch.setattr("tunedgemm.tuner.progress.time.monotonic", lambda: clock[0])
    progress, short = (Progress(output=told(), budget=budget) for budget in (0.0, 15.0))
    for each in (progress, short):
        clock[0] = 100.0
        each(None, Planned(TASKS, (), GPUS[:2], TABLE))
        each(GPUS[0], Step(TASKS[0], "check"))
        assert each.left(clock[0]) is None
        clock[0] = 110.0
        each(GPUS[0], outcome(TASKS[0]))
        each(GPUS[0], Step(TASKS[1], "check"))
        each(GPUS[1], Step(TASKS[2], "check"))

    assert progress.left(110.0) == pytest.approx((3 * 10 + 2 * 10) / 2)
    assert progress.left(114.0) == pytest.approx((3 * 10 + 2 * 6) / 2)
    assert progress.left(150.0) == pytest.approx((3 * 10 + 2 * 10) / 2)
    assert short.left(110.0) == pytest.approx(5.0)
    assert short.left(130.0) == 0.0


def test_a_terminal_keeps_the_lines_and_loses_the_display() -> None:
    """While it runs the display is there.

    At the end only the lines of the shapes remain above the summary.
    """
    output = terminal(100)
    with Progress(output=output) as progress:
        progress(None, Planned(TASKS, (), GPUS, TABLE))
        progress(GPUS[0], Step(TASKS[0], "check", FAST))
        progress(GPUS[0], outcome(TASKS[0]))
        progress._live.refresh()

    text = output.file.getvalue()
    assert "of 4 GPUs busy" in text and "1/6 a16w16 M=1" in text
    assert text.rindex("GPUs busy") < text.rindex("\x1b[2K")  # erased afterwards


def test_devices_may_emit_from_their_threads() -> None:
    """Events of many threads at once all count while a display is redrawn."""
    output = terminal()
    with Progress(output=output) as progress:
        tasks = [Task(Shape("a16w16", m, 64, 64)) for m in range(1, 201)]

        def emit(place: Place, mine: list[Task]) -> None:
            for task in mine:
                progress(place, Step(task, "time", FAST))
                progress(place, outcome(task))

        threads = [threading.Thread(target=emit, args=(place, tasks[place.device.index :: 4])) for place in GPUS]
        for thread in threads:
            thread.start()
        for _ in range(50):
            progress._live.refresh()
        for thread in threads:
            thread.join(30)

    assert len(progress.outcomes) == 200
    assert output.file.getvalue().count(": triton:fast") == 200


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), OSError(5, "Input/output error"), ValueError("closed file")])
def test_a_closed_output_does_not_end_the_run(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed pipe or terminal silences the progress.

    The outcomes are still counted, and standard output stays open.
    """

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise error

    with (tmp_path / "standard output").open("w+") as output, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", output)
        with Progress(output=Console(file=Gone())) as progress:
            progress(GPUS[0], outcome(TASKS[0]))
            progress(GPUS[0], outcome(TASKS[1]))
        output.write("later")
        output.seek(0)
        assert output.read() == "later"

    assert len(progress.outcomes) == 2


def test_the_summary_of_a_run_without_failures() -> None:
    """Gains weighted by count and torch's time, ties, statuses, seconds by activity, and the table
    with every shape.
    """
    rough = (timed(TASKS[0], Solution("triton", "slow"), "screened", us=30.0),)
    done = (
        outcome(TASKS[0], us=10.0, torch_us=20.0, tied=1, others=rough, seconds=(("compile", 1.0), ("device", 0.5))),
        outcome(TASKS[1], us=50.0, torch_us=100.0 / 2, seconds=(("compile", 2.0), ("device", 0.25))),
    )
    text = summarized(Report(GPUS, TABLE, done, skipped=(TASKS[2].shape,)))

    assert "a16w16: 2 shapes on 4 x sm_90, 132 SMs (nvidia-h200)" in text
    # 1 x 20 + 2 x 50 us before, 1 x 10 + 2 x 50 us after
    assert f"geometric mean 1.414x torch; weighted by count and time {120 / 110:.3f}x" in text
    assert "ties: 1 of 2 winners tied" in text
    assert "solutions: 4 ok, 1 screened" in text
    assert "seconds: compile 3.0, device 0.8" in text
    assert f"2 tuned, 0 failed, 1 skipped (tuned already; --all tunes them again): {TABLE}" in text
    assert "slower than torch" not in text and "skipped: " not in text
    assert "skipped: a16w16 M=4" in summarized(Report(GPUS, TABLE, done, skipped=(TASKS[2].shape,)), verbose=True)


def test_the_summary_names_what_went_wrong() -> None:
    """The summary names failed shapes, crashes, rows slower than torch, and held clocks."""
    hung = timed(TASKS[0], Solution("triton", "spins"), "hung", detail="30 s\nwere over")
    slow = attrs.evolve(outcome(TASKS[1], us=30.0, torch_us=15.0))
    slow = attrs.evolve(slow, winner=attrs.evolve(slow.winner, throttled="power cap"))
    text = summarized(Report(GPUS, TABLE, (outcome(TASKS[0], us=0, others=(hung,)), slow, Outcome(TASKS[2], None, None))))

    assert f"hung ({STATUSES['hung']}): 1\n  triton:spins on a16w16 M=1 N=1280 K=8192 bf16->bf16: 30 s were over\n" in text
    assert "failed: a16w16 M=1 N=1280 K=8192 bf16->bf16: 1 hung; torch is right, but not in --libtype\n" in text
    assert "  triton: hung: 30 s were over\n" in text and "torch: ok" not in text
    assert "failed: a16w16 M=4 N=1280 K=8192 bf16->bf16: no backend offered a solution" in text
    assert "slower than torch (not in --libtype): 1\n  a16w16 M=2 N=1280 K=8192 bf16->bf16, 0.50x\n" in text
    assert "throttled by the driver for 1 winners (power cap)" in text
    assert f"1 tuned, 2 failed: {TABLE}" in text


def test_the_summary_names_backends_that_refused_every_shape() -> None:
    """A library that does not load costs its backend every shape; limits of single shapes are not listed."""
    broken, narrow = ("deepgemm", "deep_gemm: does not load:\nbad ELF"), ("skinny", "M <= 64 (got 128)")
    both = (outcome(TASKS[0], refusals=(broken, narrow)), outcome(TASKS[1], refusals=(broken,)))
    text = summarized(Report(GPUS, TABLE, both))

    assert "backends that refused every shape: 1\n  deepgemm: deep_gemm: does not load: bad ELF\n" in text
    assert "skinny" not in text
    assert "refused" not in summarized(Report(GPUS, TABLE, (outcome(TASKS[0]),)))


def test_the_summary_gives_a_few_examples_and_all_if_verbose() -> None:
    """Fifty crashes are counted and three named; -v names them all."""
    crashes = tuple(timed(TASKS[0], Solution("triton", f"k{i}"), "crashed") for i in range(50))
    report = Report(GPUS, TABLE, (outcome(TASKS[0], others=crashes),))

    short, long = summarized(report), summarized(report, verbose=True)

    assert short.count("triton:k") == 3 and "... 47 more; -v lists them" in short
    assert long.count("triton:k") == 50


def test_the_summary_has_the_budget_and_the_bit_classes() -> None:
    """Shapes that the budget did not suffice for are counted, and named with -v.

    Classes are named by N and K, with what they cost; -v names the others, too.
    """
    group = attrs.evolve(TASKS[0].shape, m=0)
    costs = ClassCost("3f" * 8, 14, ("asm", "triton"), 1.018), ClassCost("ab" * 8, 1, ("triton",)), ClassCost("cd" * 8, 2, ("asm",), 1.2)
    found = (ChosenClass(group, costs, (Timing(group, FAST, "ok", us=10.0),)), ChosenClass(group, costs[1:2], reason="none of 3"))
    report = Report(GPUS, TABLE, (outcome(TASKS[0]),), unbegun=(TASKS[1].shape, TASKS[2].shape), classes=found)

    text = summarized(report)

    label = "3f3f3f3f3f3f3f3f: 14 kernels of asm, triton; +1.8 % over unconstrained; for any M triton:fast_[bold]v3 splitK=4"
    assert f"bit class: N=1280 K=8192 bf16: {label}\n  other classes: 2; -v lists them\n" in text
    assert "no bit class: N=1280 K=8192 bf16: none of 3\n" in text
    assert "  other class: abababababababab: 1 kernel of triton; none serves every M\n" in summarized(report, verbose=True)
    assert "1 tuned, 0 failed, 2 left (the budget is spent; the same command resumes them)" in text
    assert "not started: a16w16 M=2" in summarized(report, verbose=True)


def test_shapes_without_a_bit_class_are_not_counted_as_tuned() -> None:
    """They got no row, unless another kind of device has a class; failed ones stay failed."""
    group = attrs.evolve(TASKS[0].shape, m=0)
    outcomes = outcome(TASKS[0]), outcome(TASKS[1]), outcome(TASKS[2], us=0.0)
    none, some = ChosenClass(group, (), reason="none"), ChosenClass(group, (), (Timing(group, FAST, "ok", us=10.0),))

    without = summarized(Report(GPUS, TABLE, outcomes, classes=(none,)))
    elsewhere = summarized(Report(GPUS, TABLE, outcomes, classes=(none, some)))

    assert "0 tuned, 1 failed, 2 without a bit class and so without a row: folder" in without
    assert "2 tuned, 1 failed: folder" in elsewhere


def test_the_summary_says_where_the_log_is(tmp_path: Path) -> None:
    """The trial log is named if it exists."""
    (tmp_path / "t.trials.jsonl").touch()

    assert f"every trial: {tmp_path / 't.trials.jsonl'}" in summarized(Report(GPUS, tmp_path / "t.csv", (outcome(TASKS[0]),)))
    assert "every trial" not in summarized(Report(GPUS, TABLE, (outcome(TASKS[0]),)))
    (tmp_path / "t.v2.trials.jsonl").touch()
    assert f"every trial: {tmp_path / 't.v2.trials.jsonl'}" in summarized(Report(GPUS, tmp_path / "t.v2", (outcome(TASKS[0]),)))


def test_a_run_without_work_has_a_summary() -> None:
    """Nothing to do is one line."""
    assert summarized(Report((), TABLE, (), skipped=(TASKS[0].shape,))).splitlines() == [
        f"0 tuned, 0 failed, 1 skipped (tuned already; --all tunes them again): {TABLE}"
    ]


def test_the_summary_distinguishes_skipped_shapes() -> None:
    """--stale skips rows for other reasons than a run that skips tuned shapes.

    An input without shapes differs from both.
    """
    stale = Report((), TABLE, (), skipped=(TASKS[0].shape,))
    output = told()

    summary(stale, output=output, stale=True)

    assert "1 skipped (--stale: no rows of this device, or of the library's present version)" in output.file.getvalue()
    assert "has no shapes" in summarized(Report((), TABLE, ()))


def test_a_file_is_wide_unless_columns_says_otherwise(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines in a log are not cut at 80; COLUMNS is obeyed."""
    monkeypatch.delenv("COLUMNS", raising=False)
    assert console().width == 160

    monkeypatch.setenv("COLUMNS", "72")
    assert console().width == 72
