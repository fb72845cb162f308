"""What the tuner's search costs and misses, against timing every solution that is right for 5 + 101 rounds.

    python benchmarks/search_cost.py --log search.jsonl --count 40 --minutes 9 --json search.json

Each shape is tuned from scratch in a process of its own, as `tunedgemm tune` does; then everything that it found right,
neighbours included, is timed in 106 interleaved rounds over the same operands, and the two winners once more against each
other alone. "Loss" is the median of the per-round ratios of that last comparison, less one.

Device seconds are those of the samples; the seconds of the clock on the wall contain captures and waiting, too, on both
sides. What is done is in the log, so that the same command goes on where the last one ended.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from speed import HERE, OP, interval, shapes_of
from tunedgemm.backends.launcher import Launcher
from tunedgemm.backends.registry import Backend, Registry
from tunedgemm.device import Device, current_device
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.tuner import tune
from tunedgemm.tuner.trial import Options, Outcome, Samples
from tunedgemm.tuner.workload import Workload

WARMUP, ROUNDS, DUEL = 5, 101, 51
GOAL_RATIO, GOAL_LOSS, GOAL_SHARE = 10.0, 0.01, 0.95


def spread(shapes: list[Shape], count: int) -> list[Shape]:
    """*count* of the shapes, at equal distances in their order; all where that is 0."""
    return shapes if not count or count >= len(shapes) else [shapes[place * len(shapes) // count] for place in range(count)]


def tuned(shapes: list[Shape], options: Options, table: Path, done: Callable[[dict[str, Any]], None]) -> None:
    """Tune shapes into a table of their own; *done* gets what is kept of each outcome, when it is there."""

    def progress(_: object, event: object) -> None:
        if isinstance(event, Outcome):
            right = [timing.solution.to_dict() for timing in event.timings if timing.status in ("ok", "screened")]
            winner = event.winner.solution.to_dict() if event.winner else None
            done(
                {
                    "kind": "tuned", "shape": event.task.shape.to_dict(), "winner": winner, "right": right,
                    "tried": len(event.timings), "tied": event.tied, "seconds": dict(event.seconds),
                }
            )  # fmt: skip

    tune(OP.name, shapes, table, options, progress=progress)


def bound(registry: Registry, solutions: list[Solution], shape: Shape, device: Device) -> dict[Solution, Launcher]:
    """The launchers of solutions, those left out that do not bind any more."""
    found = {}
    for solution in solutions:
        backend = registry.get(solution.libtype)
        launcher = backend.bind(solution, shape, device) if isinstance(backend, Backend) else None
        if isinstance(launcher, Launcher):
            found[solution] = launcher
    return found


def exhaustive(registry: Registry, record: dict[str, Any], device: Device) -> dict[str, Any]:
    """Time everything that was right, and the two winners alone."""
    shape, mine = Shape.from_dict(record["shape"]), Solution.from_dict(record["winner"])
    launchers = bound(registry, [Solution.from_dict(fields) for fields in record["right"]], shape, device)
    workload = Workload(OP, shape, device)
    started, spent, us = time.perf_counter(), 0.0, {}
    for rounds in (WARMUP, ROUNDS):
        for solution, answer in workload(launchers, rounds).items():
            if isinstance(answer, Samples):
                spent += sum(answer.us) * answer.calls * 1e-6
                us[solution] = statistics.median(answer.us)
    wall = time.perf_counter() - started
    best = min(us, key=us.__getitem__)
    ratio = (1.0, 1.0, 1.0)
    if best != mine:
        pair = {solution: launchers[solution] for solution in (mine, best)}
        workload.forget(pair)
        workload(pair, WARMUP)
        answers = workload(pair, DUEL)
        ratio = interval([a / b for a, b in zip(answers[mine].us, answers[best].us, strict=True)])  # type: ignore[union-attr]
    return {
        "kind": "all", "shape": record["shape"], "timed": len(us), "best": best.to_dict(), "best_us": us[best], "winner_us": us[mine],
        "device_s": spent, "wall_s": wall, "loss": ratio[0] - 1, "loss_low": ratio[1] - 1, "loss_high": ratio[2] - 1,
    }  # fmt: skip


def read_log(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Records by kind and shape."""
    found: dict[str, dict[str, dict[str, Any]]] = {"tuned": {}, "all": {}}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # torn when the last run was stopped
        found[record["kind"]][json.dumps(record["shape"], sort_keys=True)] = record
    return found


def summarise(log: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """The totals over the shapes for which both sides are there."""
    both = [(log["tuned"][key], log["all"][key]) for key in log["all"] if key in log["tuned"]]
    rows = []
    for ours, every in both:
        device_s, shape = ours["seconds"].get("device", 0.0), ours["shape"]
        rows.append(
            {
                "M": shape["m"], "N": shape["n"], "K": shape["k"], "solutions": every["timed"], "device_s": device_s,
                "every_device_s": every["device_s"], "ratio": every["device_s"] / device_s if device_s else 0.0,
                "wall_s": ours["seconds"].get("time", 0.0), "every_wall_s": every["wall_s"], "loss": every["loss"],
                "loss_low": every["loss_low"], "loss_high": every["loss_high"],
                "winner": str(Solution.from_dict(ours["winner"])), "best": str(Solution.from_dict(every["best"])),
            }
        )  # fmt: skip
    failed = [record["shape"] for record in log["tuned"].values() if record["winner"] is None]
    if not rows:
        return {"shapes": 0, "failed": failed, "rows": []}
    return {
        "shapes": len(rows), "failed": failed,
        "device_s": sum(row["device_s"] for row in rows), "every_device_s": sum(row["every_device_s"] for row in rows),
        "ratio": sum(row["every_device_s"] for row in rows) / sum(row["device_s"] for row in rows),
        "ratio_median": statistics.median(row["ratio"] for row in rows), "ratio_least": min(row["ratio"] for row in rows),
        "wall_ratio": sum(row["every_wall_s"] for row in rows) / sum(row["wall_s"] for row in rows),
        "within_1_percent": sum(row["loss"] <= GOAL_LOSS for row in rows) / len(rows), "worst_loss": max(row["loss"] for row in rows),
        "rows": rows,
    }  # fmt: skip


def main() -> int:
    """Go on with the log, print the totals; exit 1 where they miss the goals, 3 where shapes are left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, required=True, help="JSON lines: what is done")
    parser.add_argument("--json", type=Path, help="write the totals and a row for each shape")
    parser.add_argument("--shapes", type=Path, default=HERE / "shapes.csv")
    parser.add_argument("--subset", default="layers", help="subset of the shapes file; empty for all")
    parser.add_argument("--count", type=int, default=40, help="so many shapes, spread over the subset; 0 for all")
    parser.add_argument("--chunk", type=int, default=8, help="shapes that are tuned in one go")
    parser.add_argument("--minutes", type=float, default=0.0, help="begin nothing after this time; 0 is no limit")
    parser.add_argument("--libtype", default="all")
    arguments = parser.parse_args()
    until = time.monotonic() + (arguments.minutes * 60 or float("inf"))
    shapes = spread([shape for _, shape in shapes_of(arguments.subset, arguments.shapes)], arguments.count)
    device, registry = current_device(), Registry()
    keys = {json.dumps(shape.to_dict(), sort_keys=True): shape for shape in shapes}

    def keep(record: dict[str, Any]) -> None:
        with arguments.log.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def left(kind: str) -> list[str]:
        done = read_log(arguments.log)
        return [key for key in keys if key not in done[kind] and (kind == "tuned" or (done["tuned"].get(key) or {}).get("winner"))]

    while time.monotonic() < until and (left("tuned") or left("all")):
        chunk = left("tuned")[: arguments.chunk] if not left("all") else []
        if chunk:
            seconds = 0.0 if until == float("inf") else max(1.0, until - time.monotonic())
            options = Options(libtype=arguments.libtype, all=True, resume=False, mp=1, budget=seconds)
            with tempfile.TemporaryDirectory() as folder:
                tuned([keys[key] for key in chunk], options, Path(folder) / "tuned.csv", keep)
        for key in left("all"):
            if time.monotonic() >= until:
                break
            record = exhaustive(registry, read_log(arguments.log)["tuned"][key], device)
            keep(record)
            gc.collect()
            if device.kind != "cpu":
                torch.cuda.empty_cache()
            print(
                f"{keys[key]}: {record['timed']} solutions, loss {record['loss']:+.2%}, {record['device_s']:.2f} s of the device for all",
                flush=True,
            )
    totals = summarise(
        {kind: {key: record for key, record in found.items() if key in keys} for kind, found in read_log(arguments.log).items()}
    )
    head = {"date": datetime.now(timezone.utc).date().isoformat(), "device": str(device), "versions": dict(device.versions)}
    rows = totals.pop("rows")
    print(json.dumps({**head, **totals}, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps({**head, **totals, "rows": rows}, indent=1))
    if left("tuned") or left("all"):
        return 3
    met = rows and totals["ratio"] >= GOAL_RATIO and totals["within_1_percent"] >= GOAL_SHARE
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
