"""Interrupted: a killed, stopped or concurrent tuner loses nothing and repeats nothing."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.context import BaseContext
from pathlib import Path
from types import ModuleType

import pytest
from tunedgemm.ops import op_named
from tunedgemm.table.csvfile import read_rows
from tunedgemm.timing import Timing

pytestmark = pytest.mark.slow

KILLS = 6
#: Twelve shapes for torch alone: long enough to be interrupted.
UNTUNED = "M,N,K,bias,dtype,outdtype\n" + "".join(f"{m},{n},256,False,fp32,fp32\n" for m in (1, 3, 7) for n in (64, 128, 192, 256))


def trials(table: Path) -> list[Timing]:
    """The trial lines of a log, of all runs; a line that a kill has torn off is none."""
    found, log = [], table.with_suffix(".trials.jsonl")
    for line in log.read_text().splitlines() if log.exists() else ():
        try:
            fields = json.loads(line)
        except ValueError:
            continue
        if fields.get("kind", "trial") == "trial":
            found.append(Timing.from_json(line))
    return found


def twice(table: Path) -> dict[str, int]:
    """The trials that a log has more than once."""
    counts = Counter(f"{trial.shape} {trial.solution}" for trial in trials(table))
    return {trial: count for trial, count in counts.items() if count > 1}


def final(table: Path) -> dict[tuple[str, str], str]:
    return {(str(trial.shape), str(trial.solution)): trial.status for trial in trials(table)}


def resumed(table: Path) -> int:
    """How many runs of a log went on with another's trials."""
    lines = map(json.loads, table.with_suffix(".trials.jsonl").read_text().splitlines())
    return sum(bool(line.get("resumes")) for line in lines if line["kind"] == "run")


def processes(session: int) -> list[str]:
    """Return the running processes of a session, without zombies."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, fields = (folder / "stat").read_text().rpartition(")")[::2]
        except OSError:
            continue
        state, _, _, owner = fields.split()[:4]
        if int(owner) == session and state != "Z":
            found.append(name)
    return found


def until(true: Callable[[], object], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.02)


@pytest.fixture
def replayed(faulty_plugin: Path) -> ModuleType:
    import replayed_run

    return replayed_run


@pytest.fixture
def forks(replayed: ModuleType) -> BaseContext:
    """Processes that have all modules loaded when they start."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "torch._dynamo", "replayed_run"])
    return context


def test_killed_at_random_moments_the_table_is_as_if_undisturbed(replayed: ModuleType, forks: BaseContext, tmp_path: Path) -> None:
    """After kill -9, resumed tables equal the undisturbed one, and each solution has one final trial.

    Two runs on one table, some shapes in both, keep the rows of both and a readable log.
    """
    log, calm = tmp_path / "times.jsonl", tmp_path / "calm.csv"
    replayed.record(log)
    for table in (tmp_path / "first.csv", calm):  # the first waits for the modules, too
        started = time.monotonic()
        undisturbed = forks.Process(target=replayed.run, args=(table, log))
        undisturbed.start()
        undisturbed.join()
        assert undisturbed.exitcode == 0
    seconds, dice = time.monotonic() - started, random.Random(1)
    assert len(read_rows(calm, op_named("a16w16"))[0]) == len(replayed.SHAPES)

    kills, late, tables = 0, 0, []
    while kills < KILLS:
        table = tmp_path / f"killed{len(tables)}.csv"
        tables.append(table)
        finished = False
        while not finished:
            before = len(trials(table))
            process = forks.Process(target=replayed.run, args=(table, log))
            process.start()
            process.join(dice.uniform(0.1, 0.8) * seconds if kills < KILLS else None)
            process.kill()
            process.join()
            finished = process.exitcode == 0
            assert finished or process.exitcode == -signal.SIGKILL
            kills += not finished
            late += len(trials(table)) > before
            if kills > 3 * late:  # the machine is busier than it was when the undisturbed run was timed
                seconds *= 1.1

    for table in tables:
        assert table.read_text() == calm.read_text()
        assert twice(table) == {}
        assert final(table) == final(calm)
    assert sum(resumed(table) for table in tables) >= KILLS // 4, "most kills came before anything was measured"

    shared = tmp_path / "shared.csv"
    both = [forks.Process(target=replayed.run, args=(shared, log, part)) for part in (replayed.SHAPES[:5], replayed.SHAPES[3:])]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert shared.read_text() == calm.read_text()
    assert final(shared) == final(calm)
    for line in shared.with_suffix(".trials.jsonl").read_text().splitlines():
        json.loads(line)


class Tuner:
    """``tunedgemm tune`` in a new process and session."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        self.table = folder / "t.csv"
        (folder / "in.csv").write_text(UNTUNED)
        command = [sys.executable, "-m", "tunedgemm", "tune", "-i", str(folder / "in.csv"), "-o", str(self.table), *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, start_new_session=True, env={**os.environ, **environment}, **pipes)

    @property
    def rows(self) -> int:
        return len(read_rows(self.table, op_named("a16w16"))[0]) if self.table.exists() else 0

    def finish(self, seconds: float = 120.0) -> tuple[int, str, str]:
        """(exit code, stdout, stderr); nothing of it may run any longer."""
        out, err = self.process.communicate(timeout=seconds)
        until(lambda: not processes(self.process.pid), 60, f"{processes(self.process.pid)} to end")
        return self.process.returncode, out, err


@pytest.fixture
def tuner(faulty_plugin: Path, tmp_path: Path) -> Iterator[Callable[..., Tuner]]:
    started = []

    def start(*arguments: str, **environment: str) -> Tuner:
        started.append(Tuner(tmp_path, *arguments, **environment))
        return started[-1]

    yield start
    for one in started:
        if processes(one.process.pid):
            os.killpg(one.process.pid, signal.SIGKILL)
        one.process.wait()


def test_a_stopped_tuner_keeps_its_rows_and_resumes(tuner: Callable[..., Tuner]) -> None:
    """Ctrl-C, and SIGTERM twice at once as ``timeout`` sends it, keep the rows and leave no process.

    Ctrl-C reaches the workers, too. The same command tunes the rest.
    """
    arguments = ("--libtype", "torch", "--iters", "7", "--cache", "hot")
    kept = 0
    for number, sends, code in (
        (signal.SIGINT, (os.killpg,), 130),
        (signal.SIGTERM, (os.kill, os.killpg), 143),
    ):
        run = tuner(*arguments)
        until(lambda run=run, kept=kept: run.rows >= kept + 2, 240, "two more rows")
        for send in sends:
            send(run.process.pid, number)
        exit_code, _, err = run.finish()
        assert exit_code == code, err
        assert kept + 2 <= run.rows < 12
        assert "kept" in err and "Traceback" not in err
        kept = run.rows

    last = tuner(*arguments)
    exit_code, out, err = last.finish()
    assert (exit_code, last.rows) == (0, 12), err
    assert f"{12 - kept} tuned, 0 failed, {kept} skipped" in out
    assert twice(last.table) == {}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill -9"])
def test_a_hanging_kernel_outlives_no_tuner(tuner: Callable[..., Tuner], tmp_path: Path, number: signal.Signals) -> None:
    """Without a limit a kernel may hang for ever; its process ends with the tuner."""
    mark = tmp_path / "hangs"
    hanging = tuner("--libtype", "faulty", "--kernel_timeout", "0", FAULTY_KINDS="hangs", FAULTY_MARK=str(mark))
    until(mark.exists, 240, "the hang")

    os.kill(hanging.process.pid, number)

    assert hanging.finish()[0] == (130 if number == signal.SIGINT else -signal.SIGKILL)
