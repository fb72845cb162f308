"""Killed writers, and concurrent writers.

Real processes on one table and one log.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tunedgemm.testing.replay import read_trials

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
