"""Subprocess of online tuning: tune shapes within the timeout, and print the result or why it fails.

`tunedgemm.dispatch.online` starts it, so that the serving process does not load the tuner.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device
from tunedgemm.errors import UserError
from tunedgemm.ops import op_named
from tunedgemm.process.filelocks import file_lock
from tunedgemm.shape import Shape
from tunedgemm.table.untuned import Untuned
from tunedgemm.tuner import Options, tune
from tunedgemm.tuner.plan import plan
from tunedgemm.tuner.report import why_failed

#: Solutions to try per libtype in a call: as many as AITER requests from hipBLASLt's heuristic. In
#: the background these are the best guesses alone.
CANDIDATES, GUESSES = 32, 3
#: Fractions of the timeout: end of the race, limits of one compilation or bind and of one kernel,
#: and device time of the race.
_RACED, _COMPILED, _HUNG, _MEASURED = 1 / 2, 1 / 3, 1 / 10, 1 / 10
#: In the background: fraction of the seconds for shapes, less the start; device seconds of a race;
#: compiler processes; niceness.
_SPENT, _RACE_S, _JOBS, _NICE = 0.85, 0.5, 4, 10
#: The same: uncounted and counted rounds of a race. Each sample waits for a time slice of the GPU,
#: which the server uses too: about 3 ms on an H200.
_WARMUP, _ROUNDS = 1, 21
#: Least and most seconds for further solutions, once every shape has had its guesses: the tuner
#: starts anew, and shapes that are called meanwhile wait.
_LEAST_FURTHER_S, _MOST_FURTHER_S = 20.0, 60.0
#: Seconds between looks at the parent.
_LOOK = 0.2


def child() -> None:
    """Tune the shapes that the standard input names; print the result, or the reason of a failure."""
    question = json.load(sys.stdin)
    threading.Thread(target=_end_with, args=[question["parent"]], daemon=True).start()
    seconds = float(question["seconds"])
    signal.alarm(math.ceil(seconds))
    most = Options()
    options = Options(
        libtype=question["libtype"], device=question["device"], candidates=CANDIDATES, budget=_RACED * seconds,
        timeout=min(_COMPILED * seconds, most.timeout), kernel_timeout=min(_HUNG * seconds, most.kernel_timeout),
        seconds=min(_MEASURED * seconds, most.seconds),
    )  # fmt: skip
    calls = {Shape.from_dict(fields): count for fields, count in question["shapes"]}
    if question["lock"]:
        _tune_in_background(question, calls, options)
        return
    [shape] = calls
    try:
        report = tune(shape.op, [shape], Path(question["tables"][shape.op]), options)
    except UserError as error:
        reasons = [" ".join(str(error).split())]
    else:
        reasons = [why_failed(outcome) for outcome in report.failed]
        reasons += ["no device was left to tune it on"] if report.lost else ["the tuner took too long to start"] if report.unbegun else []
    sys.stdout.write("\n".join(["", *reasons, ""]))


def _end_with(parent: int) -> None:
    """End this process and its children with its parent, also one that was killed."""
    while os.getppid() == parent:
        time.sleep(_LOOK)
    try:
        os.killpg(os.getpid(), signal.SIGKILL)
    finally:
        os._exit(1)  # it leads no group


def _tune_in_background(question: Mapping[str, Any], calls: Mapping[Shape, int], options: Options) -> None:
    """Tune shapes in order of value, unless another process does so on this machine.

    All shapes are tuned by few guesses first, then by a quick search.
    """
    path = Path(question["lock"])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        (lock := file_lock(path)).acquire(timeout=0)  # until this process ends
    except TimeoutError:
        sys.exit(question["held"])
    except (OSError, NotImplementedError) as error:
        sys.exit(f"{path}: cannot be locked ({error}); name a folder that can be written with TUNEDGEMM_HOME")
    os.nice(_NICE)
    jobs = min(_JOBS, os.cpu_count() or 1)
    few = attrs.evolve(options, candidates=GUESSES, topk=GUESSES, warmup=_WARMUP, iters=_ROUNDS, seconds=_RACE_S, jobs=jobs)
    further = attrs.evolve(few, candidates=0, all=True)
    end, faults, said, tuned = time.monotonic() + question["seconds"], list[str](), "", 0
    for chosen, least, most in ((few, 0.0, math.inf), (further, _LEAST_FURTHER_S, _MOST_FURTHER_S)):
        for op, share in _by_value(calls, Device(*question["kind"]), chosen, question["tables"]):
            if (left := end - time.monotonic()) < least:
                break
            budgeted = attrs.evolve(chosen, budget=max(share * min(_SPENT * left, most), 1.0))
            try:
                report = tune(op, _of(op, calls), Path(question["tables"][op]), budgeted)
            except UserError as error:
                faults.append(" ".join(str(error).split()))
                continue
            tuned += len(report.outcomes) - len(report.failed) if chosen is few else 0
            said = f"; {why_failed(report.failed[0])}" if report.failed else said
    lock.release()
    if faults and not tuned:
        sys.exit(faults[0])
    sys.stdout.write(f"{tuned} of {len(calls)} shapes were tuned{said}\n")


def _of(op: str, calls: Mapping[Shape, int]) -> dict[Shape, int]:
    return {shape: count for shape, count in calls.items() if shape.op == op}


def _by_value(calls: Mapping[Shape, int], device: Device, options: Options, tables: Mapping[str, str]) -> Iterator[tuple[str, float]]:
    """Yield ops by the expected saving of their shapes, each with its share of the remaining time."""
    registry, value = Registry(), dict[str, float]()
    for op, path in tables.items():
        listed: Sequence[Untuned] = [Untuned(shape, count) for shape, count in _of(op, calls).items()]
        tasks = plan(op_named(op), listed, Path(path), device, options, registry=registry).tasks if len(tables) > 1 else ()
        value[op] = sum(task.saving for task in tasks) or 1e-6
    for op in sorted(value, key=value.__getitem__, reverse=True):
        yield op, value[op] / sum(value.values())
        del value[op]
