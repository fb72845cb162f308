"""Killed writers, and concurrent writers.

Real processes on one table and one log.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tunedgemm.ops import op_named
from tunedgemm.table.csvfile import read_rows
from tunedgemm.testing.replay import read_trials

OP = op_named("a16w16")

#: Forks writers from a process without threads. A writer tunes the shapes of range(first, last),
#: with five solutions each.
WRITERS = """
import os, random, signal, sys, time
from pathlib import Path
from tunedgemm.table.csvfile import read_rows
from tunedgemm.device import Device
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.timing import Timing
from tunedgemm.tuner.store import MISSING, Store
from tunedgemm.tuner.trial import Outcome, Place, Task

op, device, folder = op_named("a16w16"), Device("sm_90", 132, "nvidia-h200", 0), Path(sys.argv[1])

def write(table, first, last, pause=0.0):
    store = Store(op, table)
    store.open({"iters": "1"})
    for m in range(first, last):
        shape = Shape("a16w16", m, 64, 128)
        if store.done(device, shape) is not MISSING:
            continue
        known = {t.solution for t in store.final_timings(device, shape)}
        trials = [Timing(shape, Solution("turbo", f"s{i}"), "ok", us=1.0 + (m * 7 + i * 3) % 11, detail="x" * 2000) for i in range(5)]
        for trial in trials[:3]:
            if trial.solution not in known:
                store.log(Place(device), [trial])
        time.sleep(pause)
        store.record(Outcome(Task(shape), min(trials, key=lambda t: t.us), None, tuple(trials), libver="1", place=Place(device)))
    store.finish()

def start(*args):
    child = os.fork()
    if child == 0:
        try:
            write(*args)
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    return child

def end(child):
    return os.waitpid(child, 0)[1]
"""


def _writers(source: str, folder: Path) -> str:
    command = [sys.executable, "-c", WRITERS + source, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_killed_at_random_moments_nothing_is_lost_or_done_twice(tmp_path):
    """Twenty times kill -9, then a run to the end.

    The table of an undisturbed run, and each trial and outcome once.
    """
    source = """
random.seed(3)
killed = 0
for _ in range(20):
    child = start(folder / "killed.csv", 1, 121, 0.03)
    time.sleep(random.uniform(0.005, 0.06))
    os.kill(child, signal.SIGKILL)
    killed += os.WIFSIGNALED(end(child))
assert end(start(folder / "killed.csv", 1, 121)) == 0
assert end(start(folder / "calm.csv", 1, 121)) == 0
print(killed)
"""
    killed = int(_writers(source, tmp_path))

    assert killed >= 15
    assert (tmp_path / "killed.csv").read_text() == (tmp_path / "calm.csv").read_text()
    log = [json.loads(line) for line in (tmp_path / "killed.trials.jsonl").read_text().splitlines() if line.endswith("}")]
    trials = Counter((line["shape"]["m"], line["solution"]["kernel_name"]) for line in log if line["kind"] == "trial")
    assert trials == {(m, f"s{i}"): 1 for m in range(1, 121) for i in range(5)}
    assert Counter(line["shape"]["m"] for line in log if line["kind"] == "shape") == dict.fromkeys(range(1, 121), 1)
    assert [line["kind"] for line in log].count("end") == 1
    assert not list(tmp_path.glob("*.jsonl.*.lock"))


def test_killed_between_log_and_table(tmp_path):
    """The next run writes the row of an outcome that only the log has."""
    source = """
import tunedgemm.tuner.store as store
real = store.upsert
store.upsert = lambda *args, **fields: os.kill(os.getpid(), signal.SIGKILL)
assert os.WIFSIGNALED(end(start(folder / "t.csv", 1, 2)))
assert not (folder / "t.csv").exists()
store.upsert = real
assert end(start(folder / "t.csv", 1, 3)) == 0
print([row.shape.m for row in read_rows(folder / "t.csv", op)[0]])
"""
    assert _writers(source, tmp_path).strip() == "[1, 2]"
    assert len(read_trials(tmp_path / "t.trials.jsonl")) == 10


def test_two_runs_on_one_table_at_once(tmp_path):
    """Both sets of rows and of trials are there, and of a dead run's trials exactly one of the two
    makes use.
    """
    source = """
dead = start(folder / "t.csv", 1, 100, 0.2)
log = folder / "t.trials.jsonl"
while not log.exists() or log.read_text().count('"trial"') < 3:
    time.sleep(0.01)
os.kill(dead, signal.SIGKILL)
end(dead)
both = [start(folder / "t.csv", first, first + 30) for first in (1, 101)]
assert [end(child) for child in both] == [0, 0]
"""
    _writers(source, tmp_path)

    table = {row.shape.m for row in read_rows(tmp_path / "t.csv", OP)[0]}
    log = [json.loads(line) for line in (tmp_path / "t.trials.jsonl").read_text().splitlines()]
    assert table == {*range(1, 31), *range(101, 131)}
    headers = [line for line in log if line["kind"] == "run"]
    assert sorted(len(header["resumes"]) for header in headers) == [0, 0, 1]
    assert {line["shape"]["m"] for line in log if line["kind"] == "shape"} == table
    assert [line["kind"] for line in log].count("end") == 2
