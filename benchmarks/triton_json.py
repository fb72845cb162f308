"""What JSON files of Triton kernels gain over the first guess, and what buckets of M cost beside tuning each M.

    python benchmarks/triton_json.py --op a8w8_blockscale --files files/ --pairs 1024x1024,4096x1024 --rows 16,64,256 --json gain.json
    python benchmarks/triton_json.py --op a8w8_blockscale --files files/ --untuned between.csv --table between-tuned.csv --json regret.json

For each shape the file's choice, the backend's first guess, the guess once more (A/A) and torch's own call take turns in every round; with
``--table`` so does the row of exactly that M. A gain is the median of a round's ratios guess over choice, a regret that of choice over
row, less 1, each with its 95 % interval by order statistics. Weights are cold, calls run in CUDA graphs.
"""

from __future__ import annotations

import argparse
import json
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from speed import FIELDS, SLOWER, geometric_mean, interval, shapes_of_file
from tunedgemm.csvfile import key_shape, read_rows
from tunedgemm.device import Device, current_device
from tunedgemm.launcher import Launcher
from tunedgemm.ops import op_named
from tunedgemm.registry import Backend, Registry
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.tuner.trial import Samples
from tunedgemm.tuner.workload import Workload
from tunedgemm_triton.jsonfiles.dialect import OURS

NAMES = ("choice", "guess", "again", "own", "torch")
LABELS = {name: Solution("measured", name) for name in NAMES}


def solutions_of(shape: Shape, device: Device, registry: Registry, rows: dict[Shape, Solution]) -> dict[str, Solution]:
    """What is timed on one shape, by its role."""
    triton, builtin = registry.get("triton"), registry.get("torch")
    assert isinstance(triton, Backend)
    assert isinstance(builtin, Backend)
    choice = triton.heuristic_fallback(shape, device)
    if choice is None:
        raise SystemExit(f"{shape} on {device}: no JSON file answers")
    guess = next(iter(OURS.listed(shape, device)))
    found = {"choice": choice, "guess": guess, "again": guess}
    default = builtin.heuristic_fallback(shape, device)
    found |= {"torch": default} if default else {}
    return found | ({"own": rows[key_shape(shape)]} if key_shape(shape) in rows else {})


def measured(shape: Shape, device: Device, registry: Registry, rows: dict[Shape, Solution], rounds: int) -> dict[str, Any]:
    """Times of one shape, and their ratios."""
    solutions = solutions_of(shape, device, registry, rows)
    launchers = {}
    for name, solution in solutions.items():
        backend = registry.get(solution.libtype)
        launcher = backend.bind(solution, shape, device) if isinstance(backend, Backend) else backend
        if isinstance(launcher, Launcher):
            launchers[LABELS[name]] = launcher
        elif name != "torch":
            raise SystemExit(f"{shape}: {solution}: {launcher}")
    workload = Workload(op_named(shape.op), shape, device, seed=1)
    workload(launchers, 5)
    answers = workload(launchers, rounds)
    samples = {key.kernel_name: answer.us for key, answer in answers.items() if isinstance(answer, Samples)}
    found: dict[str, Any] = {"M": shape.m, "N": shape.n, "K": shape.k, **{name: str(solution) for name, solution in solutions.items()}}
    found |= {f"{name}_us": interval(list(us))[0] for name, us in samples.items()}
    ratios = {"gain": ("guess", "choice"), "control": ("guess", "again"), "over_torch": ("torch", "choice"), "regret": ("choice", "own")}
    for what, (over, under) in ratios.items():
        if over in samples and under in samples:
            less = 1.0 if what == "regret" else 0.0
            found[what] = interval([a / b - less for a, b in zip(samples[over], samples[under], strict=True)])
    return {**found, "samples": samples}


def summary(results: list[dict[str, Any]]) -> list[str]:
    """A line for each ratio: its mean, its worst, and of how many the whole interval is beyond 2 %."""
    lines = []
    for what in ("gain", "control", "over_torch"):
        if found := [result[what] for result in results if what in result]:
            values, slower = [median for median, _, _ in found], sum(1 for _, _, high in found if high < SLOWER)
            lines.append(
                f"{what}: geometric mean {geometric_mean(values):.3f} over {len(values)}, least {min(values):.3f}, {slower} slower"
            )
    if found := [result["regret"] for result in results if "regret" in result]:
        values, more = [median for median, _, _ in found], sum(1 for _, low, _ in found if low > 1 - SLOWER)
        mean = geometric_mean([1 + value for value in values]) - 1
        lines.append(f"regret: {mean:.3f} in the mean over {len(values)}, at most {max(values):.3f}, {more} beyond {1 - SLOWER:.2f}")
    return lines


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", default="a8w8_blockscale", choices=FIELDS)
    parser.add_argument("--files", type=Path, required=True, help="folder of the JSON files")
    parser.add_argument("--pairs", default="", help="NxK,NxK")
    parser.add_argument("--rows", default="16,32,64,128,256,512,2048,4096", help="M of each pair")
    parser.add_argument("--untuned", type=Path, help="an untuned file, in place of pairs and rows")
    parser.add_argument("--table", type=Path, help="a tuned table with a row for each of the shapes")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--json", type=Path, help="write everything, raw samples included")
    arguments = parser.parse_args()
    os.environ["TUNEDGEMM_TRITON_JSON"] = str(arguments.files.resolve())
    op, device, registry = op_named(arguments.op), current_device(), Registry()
    sizes = [tuple(map(int, pair.split("x"))) for pair in arguments.pairs.split(",") if pair]
    shapes = [Shape(op.name, int(m), n, k, **FIELDS[op.name]) for n, k in sizes for m in arguments.rows.split(",")]  # type: ignore[arg-type]
    if arguments.untuned:
        shapes = [shape for _, shape in shapes_of_file(arguments.untuned, op.name)]
    rows = {row.shape: row.solution for row in read_rows(arguments.table, op)[0] if row.valid} if arguments.table else {}
    results = []
    for shape in shapes:
        result = measured(shape, device, registry, rows, arguments.rounds)
        results.append(result)
        told = " ".join(f"{what} {result[what][0]:.3f}" for what in ("gain", "regret", "over_torch") if what in result)
        print(f"M={shape.m} N={shape.n} K={shape.k}: {result['choice_us']:.2f} us {told}", flush=True)
    lines = summary(results)
    print("\n".join(lines))
    if arguments.json:
        head = {"date": datetime.now(timezone.utc).date().isoformat(), "device": str(device), "versions": dict(device.versions)}
        arguments.json.write_text(json.dumps({**head, "op": op.name, "rounds": arguments.rounds, "summary": lines, "results": results}))


if __name__ == "__main__":
    main()
