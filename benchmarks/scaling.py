"""Shapes tuned in a minute with 1, 2 and 4 devices of one machine, the compile cache warm.

    python benchmarks/scaling.py --folder scaling --json scaling.json --devices 1,2,4 --subset decode --count 104

A first run on all devices fills the compile cache and is not counted. Each run tunes the same shapes from scratch, in a
process of its own. The rate counts from when the shapes were planned, its workers started, to the last outcome; the
seconds of the whole process stand beside it.
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

from search_cost import spread
from speed import HERE, shapes_of
from tunedgemm.tuner import tune
from tunedgemm.tuner.trial import Options, Outcome, Planned

GOALS = {2: 1.9, 4: 3.6}


def tuned(arguments: argparse.Namespace) -> dict[str, Any]:
    """Tune on some devices; how long it took."""
    shapes = spread([shape for _, shape in shapes_of(arguments.subset, arguments.shapes)], arguments.count)
    table = Path(arguments.folder) / f"{arguments.label}.csv"
    times: list[float] = []

    def progress(_: object, event: object) -> None:
        if isinstance(event, Planned | Outcome):
            times.append(time.perf_counter())

    options = Options(mp=arguments.one, jobs=arguments.jobs, resume=False)
    report = tune(shapes=shapes, output=table, options=options, progress=progress)
    activities: dict[str, float] = {}
    for outcome in report.outcomes:
        for activity, seconds in outcome.seconds:
            activities[activity] = activities.get(activity, 0.0) + seconds
    seconds = times[-1] - times[0]
    return {
        "devices": arguments.one, "device": str(report.places[0].device), "shapes": len(report.outcomes), "failed": len(report.failed),
        "seconds": seconds, "per_minute": 60 * len(report.outcomes) / seconds,
        "lane_seconds": {activity: round(total, 2) for activity, total in activities.items()},
    }  # fmt: skip


def run(devices: int, label: str) -> dict[str, Any]:
    """One run in a process of its own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--one", str(devices), "--label", label]
    started = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found |= {"label": label, "process_seconds": time.perf_counter() - started}
    print(json.dumps(found), flush=True)
    return found


def main() -> int:
    """Run, or be one of the runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--folder", required=True, help="keeps the tables")
    add("--json", type=Path, required=True)
    add("--shapes", type=Path, default=HERE / "shapes.csv")
    add("--subset", default="decode", help="subset of the shapes file; empty for all")
    add("--count", type=int, default=104, help="so many shapes, spread over the subset")
    add("--devices", default="1,2,4", help="numbers of devices, in the order of the runs")
    add("--jobs", type=int, default=16, help="processes that compile, the same in every run")
    add("--one", type=int, default=0, help=argparse.SUPPRESS)
    add("--label", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(tuned(arguments)))
        return 0
    Path(arguments.folder).mkdir(parents=True, exist_ok=True)
    counts = [int(text) for text in arguments.devices.split(",")]
    runs = [run(max(counts), "cold")]
    for count in counts:
        runs.append(run(count, f"{count}-devices"))
        rates = {found["devices"]: found["per_minute"] for found in runs[1:]}
        speedups = {str(devices): rate / rates[1] for devices, rate in rates.items()} if 1 in rates else {}
        summary = {"date": f"{datetime.now(timezone.utc):%Y-%m-%d}", "speedups": speedups, "runs": runs}
        arguments.json.write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(speedups))
    return 0 if all(speedups.get(str(devices), 0.0) >= goal for devices, goal in GOALS.items() if devices in counts) else 1


if __name__ == "__main__":
    sys.exit(main())
