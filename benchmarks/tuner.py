"""Measure the tuner: what its search costs and misses, whether it finds the same twice, and how it
scales over devices.

    python benchmarks/tuner.py --only cost --count 40 --budget 540 -o tuner

    python benchmarks/tuner.py --only stability --count 24 -o tuner

    python benchmarks/tuner.py --only scaling --shapes decode --count 104 --devices 1 2 4 -o tuner

cost
    Each shape is tuned from scratch in a separate process, as `tunedgemm tune` does. Everything
    that was found right, neighbours included, is then timed in 5 + 101 interleaved rounds over the
    same operands, and the two winners against each other alone. "Loss" is the median of the
    per-round ratios of that last comparison, less one. Device seconds are those of the samples;
    wall seconds contain captures and waiting on both sides. Goals: a tenth of the device seconds; a
    loss of at most 1 % for 95 % of the shapes.
stability
    Two tables are tuned from scratch, each in a separate process. A third process times the two
    winners of each shape in the same rounds, with the first winner again as A/A control. Winners
    tie if the interval of their ratio reaches into the tuner's own band of ties. Goals: winners
    differ only among ties, and neither table loses 1 %.
scaling
    Shapes tuned in a minute on 1, 2 and 4 devices, after a run that fills the compile cache; with
    `--states warm cold` also from empty caches. Each run is a separate process. The rate counts
    from when the shapes were planned to the last outcome. Goals: 1.95 and 3.7 times the rate of one
    device. With `--fake`, devices and compilers sleep instead of working, on any machine. That
    shows what the tuning process alone allows; the goals are 1.97 and 3.9.

The output folder keeps what is done: the same command resumes. Exit 1 if a goal is missed, 3 if
shapes are left.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from fake_devices import fake_devices
from harness import OP, add_budget, add_only, add_rounds, add_shapes, head, interval, parser_of, ratio, read_log, save, shapes_of, spread
from tunedgemm.backends.backend import Backend
from tunedgemm.backends.launcher import Launcher
from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device, current_device
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import read_rows
from tunedgemm.tuner import tune
from tunedgemm.tuner.rounds import Workload
from tunedgemm.tuner.select import DEFAULT_TIE
from tunedgemm.tuner.trial import Options, Outcome, Place, Planned, Samples, Step

WARMUP, ROUNDS, PAIRED = 5, 101, 51
GOAL_RATIO, GOAL_LOSS, GOAL_SHARE = 10.0, 0.01, 0.95
GOAL_SPEEDUP = {2: 1.95, 4: 3.7}
#: The same of fake devices, which the tuning process alone can hold up.
GOAL_FAKE = {2: 1.97, 4: 3.9}
KINDS = ("tuned", "all")
TABLES = ("first.csv", "second.csv")
LEFT = 3


def sizes(shape: Shape) -> dict[str, int]:
    """Return the sizes of a shape as columns."""
    return {"M": shape.m, "N": shape.n, "K": shape.k}


def bound(registry: Registry, solutions: list[Solution], shape: Shape, device: Device) -> dict[Solution, Launcher]:
    """Return the launchers of the solutions that bind."""
    launchers = {}
    for solution in solutions:
        backend = registry.get(solution.libtype)
        launcher = backend.bind(solution, shape, device) if isinstance(backend, Backend) else None
        if isinstance(launcher, Launcher):
            launchers[solution] = launcher
    return launchers


def deadline(arguments: argparse.Namespace) -> float:
    """Return when nothing more may begin."""
    return time.monotonic() + (arguments.budget or float("inf"))


def seconds_until(until: float) -> float:
    """Return the seconds that are left, as a budget (0: unlimited)."""
    return 0.0 if until == float("inf") else max(1.0, until - time.monotonic())


def tuned(shapes: list[Shape], options: Options, table: Path, keep: Callable[[dict[str, Any]], None]) -> None:
    """Tune shapes into a new table; pass a record of each outcome to *keep* as it arrives."""

    def progress(_: object, event: object) -> None:
        if isinstance(event, Outcome):
            right = [timing.solution.to_dict() for timing in event.timings if timing.status in ("ok", "screened")]
            winner = event.winner.solution.to_dict() if event.winner else None
            keep(
                {
                    "kind": "tuned", "shape": event.task.shape.to_dict(), "winner": winner, "right": right,
                    "tried": len(event.timings), "tied": event.tied, "seconds": dict(event.seconds),
                }
            )  # fmt: skip

    tune(OP, shapes, table, options, progress=progress)


def exhaustive(registry: Registry, record: dict[str, Any], device: Device) -> dict[str, Any]:
    """Time everything that was right, and the two winners alone."""
    shape, mine = Shape.from_dict(record["shape"]), Solution.from_dict(record["winner"])
    launchers = bound(registry, [Solution.from_dict(fields) for fields in record["right"]], shape, device)
    workload = Workload(op_named(OP), shape, device)
    started, spent, us = time.perf_counter(), 0.0, {}
    for rounds in (WARMUP, ROUNDS):
        for solution, answer in workload(launchers, rounds).items():
            if isinstance(answer, Samples):
                spent += sum(answer.us) * answer.calls * 1e-6
                us[solution] = statistics.median(answer.us)
    wall = time.perf_counter() - started
    best, loss = min(us, key=us.__getitem__), (1.0, 1.0, 1.0)
    if best != mine:
        pair = {solution: launchers[solution] for solution in (mine, best)}
        workload.forget(pair)
        workload(pair, WARMUP)
        answers = workload(pair, PAIRED)
        loss = ratio(answers[mine].us, answers[best].us)  # type: ignore[union-attr]
    return {
        "kind": "all", "shape": record["shape"], "timed": len(us), "best": best.to_dict(), "best_us": us[best], "winner_us": us[mine],
        "device_s": spent, "wall_s": wall, "loss": loss[0] - 1, "loss_low": loss[1] - 1, "loss_high": loss[2] - 1,
    }  # fmt: skip


def cost_rows(log: dict[str, dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return a row for each shape of which both sides are measured."""
    rows = []
    for key, every in log["all"].items():
        ours, shape = log["tuned"][key], every["shape"]
        device_s = ours["seconds"].get("device", 0.0)
        rows.append(
            {
                "M": shape["m"], "N": shape["n"], "K": shape["k"], "solutions": every["timed"], "device_s": device_s,
                "every_device_s": every["device_s"], "ratio": every["device_s"] / device_s if device_s else 0.0,
                "wall_s": ours["seconds"].get("time", 0.0), "every_wall_s": every["wall_s"], "loss": every["loss"],
                "loss_low": every["loss_low"], "loss_high": every["loss_high"],
                "winner": str(Solution.from_dict(ours["winner"])), "best": str(Solution.from_dict(every["best"])),
            }
        )  # fmt: skip
    return rows


def cost_totals(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the totals over all shapes."""
    if not rows:
        return {"shapes": 0}
    total = {name: sum(row[name] for row in rows) for name in ("device_s", "every_device_s", "wall_s", "every_wall_s")}
    return {
        "shapes": len(rows), "device_s": total["device_s"], "every_device_s": total["every_device_s"],
        "ratio": total["every_device_s"] / total["device_s"], "ratio_median": statistics.median(row["ratio"] for row in rows),
        "ratio_least": min(row["ratio"] for row in rows), "wall_ratio": total["every_wall_s"] / total["wall_s"],
        "within_1_percent": sum(row["loss"] <= GOAL_LOSS for row in rows) / len(rows), "worst_loss": max(row["loss"] for row in rows),
    }  # fmt: skip


def cost(arguments: argparse.Namespace, shapes: list[Shape]) -> int:
    """Measure what the search costs and misses; resume from the log in the output folder."""
    until, device, registry = deadline(arguments), current_device(), Registry()
    keys, path = {json.dumps(shape.to_dict(), sort_keys=True): shape for shape in shapes}, arguments.output / "cost.jsonl"

    def keep(record: dict[str, Any]) -> None:
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def left(kind: str) -> list[str]:
        done = read_log(path, KINDS)
        return [key for key in keys if key not in done[kind] and (kind == "tuned" or (done["tuned"].get(key) or {}).get("winner"))]

    while time.monotonic() < until and (left("tuned") or left("all")):
        if not left("all"):
            options = Options(libtype=arguments.libtype, all=True, resume=False, mp=1, budget=seconds_until(until))
            with tempfile.TemporaryDirectory() as folder:
                tuned([keys[key] for key in left("tuned")[: arguments.chunk]], options, Path(folder) / "tuned.csv", keep)
        for key in left("all"):
            if time.monotonic() >= until:
                break
            record = exhaustive(registry, read_log(path, KINDS)["tuned"][key], device)
            keep(record)
            gc.collect()
            if device.kind != "cpu":
                torch.cuda.empty_cache()
            print(f"{keys[key]}: {record['timed']} solutions, loss {record['loss']:+.2%}, {record['device_s']:.2f} s for all", flush=True)
    log = {kind: {key: record for key, record in records.items() if key in keys} for kind, records in read_log(path, KINDS).items()}
    failed, rows = [record["shape"] for record in log["tuned"].values() if record["winner"] is None], cost_rows(log)
    totals = cost_totals(rows)
    summary = [f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}" for name, value in totals.items()]
    print("\n".join(summary))
    save(arguments.output, head("tuner", summary=summary, totals=totals, failed=failed, rows=rows), "cost")
    if left("tuned") or left("all"):
        return LEFT
    return 0 if rows and totals["ratio"] >= GOAL_RATIO and totals["within_1_percent"] >= GOAL_SHARE else 1


def winners(table: Path, op: str = OP) -> dict[Shape, Solution]:
    """Return the solution of each shape of a table."""
    return {row.shape: row.solution for row in read_rows(table, op_named(op))[0]} if table.exists() else {}


def against(registry: Registry, shape: Shape, pair: tuple[Solution, Solution], device: Device, rounds: int) -> dict[str, Any]:
    """Time two winners of one shape in the same rounds."""
    launchers, (first, second) = bound(registry, list(dict.fromkeys(pair)), shape, device), pair
    again = Solution("again", "again")
    launchers[again] = launchers[first]
    workload = Workload(op_named(shape.op), shape, device, seed=2)
    workload(launchers, WARMUP)
    us = {solution: answer.us for solution, answer in workload(launchers, rounds).items() if isinstance(answer, Samples)}
    gain, control = ratio(us[first], us[second]), ratio(us[first], us[again])
    tie = gain[1] <= 1 + DEFAULT_TIE and gain[2] >= 1 / (1 + DEFAULT_TIE)
    return {
        **sizes(shape), "first": str(first), "second": str(second), "verdict": "same" if first == second else "tie" if tie else "differ",
        "first_us": interval(us[first])[0], "second_us": interval(us[second])[0], "ratio": gain, "control": control,
        "loss_first": max(0.0, gain[0] - 1), "loss_second": max(0.0, 1 / gain[0] - 1),
    }  # fmt: skip


def compared(arguments: argparse.Namespace, shapes: list[Shape]) -> int:
    """Time the winners of both tables against each other, and keep the verdicts."""
    first, second = (winners(arguments.output / table) for table in TABLES)
    device, registry, rows = current_device(), Registry(), []
    for shape in shapes:
        if shape not in first or shape not in second:
            rows.append({**sizes(shape), "verdict": "missing"})
            continue
        rows.append(against(registry, shape, (first[shape], second[shape]), device, arguments.rounds))
        print(json.dumps(rows[-1]), flush=True)
    verdicts = [row["verdict"] for row in rows]
    worst = max((max(row["loss_first"], row["loss_second"]) for row in rows if row["verdict"] in ("tie", "differ")), default=0.0)
    control = max((abs(row["control"][0] - 1) for row in rows if "control" in row), default=0.0)
    counted = ", ".join(f"{word} {verdicts.count(word)}" for word in ("same", "tie", "differ", "missing"))
    summary = [f"{len(rows)} shapes: {counted}", f"worst loss {worst:.2%}, worst control {control:.2%}"]
    print("\n".join(summary))
    save(arguments.output, head("tuner", device, summary=summary, rows=rows), "stability")
    return int("differ" in verdicts or "missing" in verdicts or worst >= GOAL_LOSS)


def step(words: list[str], *more: str, variables: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run one step in a separate process, with the same options."""
    environment = {**os.environ, **(variables or {})}
    return subprocess.run([sys.executable, __file__, *words, *more], stdout=subprocess.PIPE, text=True, check=False, env=environment)


def stability(arguments: argparse.Namespace, shapes: list[Shape], words: list[str]) -> int:
    """Tune the two tables and compare them, each in a separate process."""
    until = deadline(arguments)
    for name in TABLES:
        if any(shape not in winners(arguments.output / name) for shape in shapes) and time.monotonic() < until:
            step(words, "--step", name, "--budget", str(seconds_until(until))).check_returncode()
    if any(shape not in winners(arguments.output / name) for name in TABLES for shape in shapes) and time.monotonic() >= until:
        print("shapes are left to tune; the same command resumes")
        return LEFT
    done = step(words, "--step", "compare")
    print(done.stdout, end="")
    return done.returncode


def rate(arguments: argparse.Namespace, shapes: list[Shape], run: str) -> dict[str, Any]:
    """Tune from scratch on some devices, and return how long it took and what was not parallel."""
    begun, ended = 0.0, 0.0
    first: dict[int, float] = {}
    last: dict[int, float] = {}  # by index: two devices of a kind are equal
    table, devices = arguments.output / f"scaling-{run}.csv", int(run.partition("-")[0])
    table.unlink(missing_ok=True)

    def progress(place: Place | None, event: object) -> None:
        nonlocal begun, ended
        now = time.perf_counter()
        if isinstance(event, Planned):
            begun = now
        elif place is not None and isinstance(event, Step) and event.activity == "check":
            first.setdefault(place.device.index, now)
        elif place is not None and isinstance(event, Outcome):
            ended = last[place.device.index] = now

    options = Options(libtype=arguments.libtype, mp=devices, jobs=arguments.jobs, resume=False)
    with fake_devices(devices) if arguments.fake else contextlib.nullcontext():
        report = tune(shapes=shapes, output=table, options=options, progress=progress)
    activities: dict[str, float] = {}
    for outcome in report.outcomes:
        for activity, seconds in outcome.seconds:
            activities[activity] = activities.get(activity, 0.0) + seconds
    seconds = ended - begun
    return {
        "devices": devices, "shapes": len(report.outcomes), "failed": len(report.failed), "seconds": seconds,
        "per_minute": 60 * len(report.outcomes) / seconds,
        "device_seconds": {activity: round(total, 2) for activity, total in activities.items()},
        "start_seconds": round(statistics.mean(first.values()) - begun, 2),
        "idle_end_seconds": round(ended - statistics.mean(last.values()), 2),
        "host_cpu_seconds": round(time.process_time(), 2),
    }  # fmt: skip


def caches(folder: Path) -> dict[str, str]:
    """Return the variables that keep all compiled kernels in a folder."""
    return {"TUNEDGEMM_CACHE": str(folder), "TRITON_CACHE_DIR": str(folder / "triton"), "CUDA_CACHE_PATH": str(folder / "cuda")}


def scaling(arguments: argparse.Namespace, words: list[str]) -> int:
    """Tune on each number of devices, with an empty and with a full compile cache; resume from the log."""
    until, path = deadline(arguments), arguments.output / "scaling.jsonl"
    rows = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    runs = [(max(arguments.devices), "cold"), *((devices, state) for state in arguments.states for devices in arguments.devices)]
    for devices, state in dict.fromkeys(runs):
        run = f"{devices}-{state}"
        if run in [row["run"] for row in rows] or time.monotonic() >= until:
            continue
        started = time.perf_counter()
        filled_by = max(arguments.devices) if state == "warm" else devices
        done = step(words, "--step", run, variables=caches(arguments.output / f"cache-{filled_by}"))
        done.check_returncode()
        rows.append({"run": run, **json.loads(done.stdout.splitlines()[-1]), "process_seconds": time.perf_counter() - started})
        print(json.dumps(rows[-1]), flush=True)
        with path.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    rates = {row["run"]: row["per_minute"] for row in rows}
    speedups = {run: value / one for run, value in rates.items() if (one := rates.get(f"1-{run.partition('-')[2]}"))}
    summary = [f"{run}: {value:.2f} times one device" for run, value in speedups.items()]
    print("\n".join(summary))
    save(arguments.output, head("tuner", summary=summary, rows=rows), "scaling")
    goals = GOAL_FAKE if arguments.fake else GOAL_SPEEDUP
    if any(f"{devices}-{state}" not in rates for devices, state in runs):
        return LEFT
    return int(any(speedups.get(f"{devices}-warm", goal) < goal for devices, goal in goals.items()))


def main(words: list[str] | None = None) -> int:
    """Answer the questions that were asked for, or run one step of an answer."""
    parser = parser_of(__doc__)
    add_only(parser, ("cost", "stability", "scaling"), ("cost",))
    add_shapes(parser, "layers")
    add_rounds(parser, ROUNDS)
    add_budget(parser)
    parser.add_argument("--count", type=int, default=40, help="number of shapes, spread over the list; 0 for all (default: %(default)s)")
    parser.add_argument("--chunk", type=int, default=8, help="shapes that are tuned together, for cost (default: %(default)s)")
    parser.add_argument("--libtype", default="all", help="backends to tune (default: %(default)s)")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4], help="numbers of devices, for scaling (default: 1 2 4)")
    parser.add_argument("--states", nargs="+", choices=("warm", "cold"), default=["warm"], help="of the compile cache, for scaling")
    parser.add_argument("--jobs", type=int, default=0, help="compiling processes, for scaling; 0 for one on each core")
    parser.add_argument("--fake", action="store_true", help="scale over devices and compilers that sleep instead of working")
    parser.add_argument("--step", default="", help=argparse.SUPPRESS)
    words = sys.argv[1:] if words is None else words
    arguments = parser.parse_args(words)
    if arguments.output is None:
        parser.error("-o FOLDER is required: it keeps what is done")
    arguments.output.mkdir(parents=True, exist_ok=True)
    shapes = spread([shape for _, shape in shapes_of(arguments.shapes)], arguments.count)
    if arguments.step == "compare":
        return compared(arguments, shapes)
    if arguments.step in TABLES:
        tune(OP, shapes, arguments.output / arguments.step, Options(libtype=arguments.libtype, mp=1, budget=arguments.budget))
        return 0
    if arguments.step:
        print(json.dumps(rate(arguments, shapes, arguments.step)))
        return 0
    answers = {
        "cost": lambda: cost(arguments, shapes),
        "stability": lambda: stability(arguments, shapes, words),
        "scaling": lambda: scaling(arguments, words),
    }
    return max(answers[question]() for question in arguments.only)


if __name__ == "__main__":
    sys.exit(main())
