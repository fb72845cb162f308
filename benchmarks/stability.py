"""Does tuning find the same twice? Two tables from scratch, and their winners against each other.

    python benchmarks/stability.py --folder stability --count 24 --json stability.json

Each table is tuned in a process of its own; a third one times the two winners of each shape in the same rounds, with an
A/A control: the first winner again under another name. Winners tie where the interval of their ratio reaches into the
band in which the tuner itself calls a tie (1 %, what torch's own call is spared). "Loss" of a table is how much slower its
winner is than the other table's. The folder keeps the tables: the same command goes on where the last one ended.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from search_cost import WARMUP, bound, spread
from speed import HERE, OP, interval, shapes_of
from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device, current_device
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import read_rows
from tunedgemm.tuner import tune
from tunedgemm.tuner.select import DEFAULT_TIE
from tunedgemm.tuner.trial import Options, Samples
from tunedgemm.tuner.workload import Workload

TABLES = ("first.csv", "second.csv")
GOAL_LOSS = 0.01


def winners(table: Path) -> dict[Shape, Solution]:
    """The solution of each shape of a table."""
    return {row.shape: row.solution for row in read_rows(table, OP)[0]} if table.exists() else {}


def against(registry: Registry, shape: Shape, pair: tuple[Solution, Solution], device: Device, rounds: int) -> dict[str, Any]:
    """Time two winners of one shape in the same rounds."""
    launchers = bound(registry, list(dict.fromkeys(pair)), shape, device)
    first, second = pair
    again = Solution("again", "again")
    launchers[again] = launchers[first]
    workload = Workload(OP, shape, device, seed=2)
    workload(launchers, WARMUP)
    answers = workload(launchers, rounds)
    us = {solution: answer.us for solution, answer in answers.items() if isinstance(answer, Samples)}
    ratio = interval([a / b for a, b in zip(us[first], us[second], strict=True)])
    control = interval([a / b for a, b in zip(us[first], us[again], strict=True)])
    low, high = ratio[1], ratio[2]
    verdict = "same" if first == second else "tie" if low <= 1 + DEFAULT_TIE and high >= 1 / (1 + DEFAULT_TIE) else "differ"
    return {
        "M": shape.m, "N": shape.n, "K": shape.k, "first": str(first), "second": str(second), "verdict": verdict,
        "first_us": interval(list(us[first]))[0], "second_us": interval(list(us[second]))[0],
        "ratio": ratio[0], "low": low, "high": high, "control": control[0], "control_low": control[1], "control_high": control[2],
        "loss_first": max(0.0, ratio[0] - 1), "loss_second": max(0.0, 1 / ratio[0] - 1),
    }  # fmt: skip


def compared(tables: list[Path], shapes: list[Shape], rounds: int, target: Path) -> int:
    """Time the winners of all shapes against each other, print and keep the verdicts."""
    first, second = (winners(table) for table in tables)
    device, registry = current_device(), Registry()
    results = []
    for shape in shapes:
        if shape not in first or shape not in second:
            results.append({"M": shape.m, "N": shape.n, "K": shape.k, "verdict": "missing"})
            continue
        results.append(against(registry, shape, (first[shape], second[shape]), device, rounds))
        print(json.dumps(results[-1]), flush=True)
    verdicts = [result["verdict"] for result in results]
    losses = [max(result["loss_first"], result["loss_second"]) for result in results if result["verdict"] in ("tie", "differ")]
    head = {
        "date": datetime.now(timezone.utc).date().isoformat(), "device": str(device), "versions": dict(device.versions), "rounds": rounds,
        "shapes": len(results), **{word: verdicts.count(word) for word in ("same", "tie", "differ", "missing")},
        "worst_loss": max(losses, default=0.0),
        "worst_control": max((abs(result["control"] - 1) for result in results if "control" in result), default=0.0),
    }  # fmt: skip
    print(json.dumps(head, indent=1))
    target.write_text(json.dumps({**head, "results": results}, indent=1))
    return 1 if head["differ"] or head["missing"] or head["worst_loss"] >= GOAL_LOSS else 0


def main() -> int:
    """Tune twice, compare; exit 1 where winners differ beyond ties, 3 where shapes are left to tune."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="keeps the two tables")
    parser.add_argument("--json", type=Path, required=True, help="the verdicts")
    parser.add_argument("--shapes", type=Path, default=HERE / "shapes.csv")
    parser.add_argument("--subset", default="layers", help="subset of the shapes file; empty for all")
    parser.add_argument("--count", type=int, default=24, help="so many shapes, spread over the subset; 0 for all")
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--minutes", type=float, default=0.0, help="tune no longer than this; 0 is no limit")
    parser.add_argument("--libtype", default="all")
    parser.add_argument("--only", choices=("first.csv", "second.csv", "compare"), help="one step, as the others are run")
    arguments = parser.parse_args()
    shapes = spread([shape for _, shape in shapes_of(arguments.subset, arguments.shapes)], arguments.count)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    tables = [arguments.folder / name for name in TABLES]
    if arguments.only == "compare":
        return compared(tables, shapes, arguments.rounds, arguments.json)
    if arguments.only:
        options = Options(libtype=arguments.libtype, mp=1, budget=arguments.minutes * 60)
        tune(OP.name, shapes, arguments.folder / arguments.only, options)
        return 0
    until = time.monotonic() + (arguments.minutes * 60 or float("inf"))
    for table in tables:
        left = [shape for shape in shapes if shape not in winners(table)]
        if left and time.monotonic() < until:
            minutes = (until - time.monotonic()) / 60 if until != float("inf") else 0.0
            subprocess.run([sys.executable, *sys.argv, "--only", table.name, "--minutes", str(minutes)], check=True)
    if any(shape not in winners(table) for table in tables for shape in shapes) and time.monotonic() >= until:
        print("shapes are left to tune: the same command goes on")
        return 3
    return subprocess.run([sys.executable, *sys.argv, "--only", "compare"], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
