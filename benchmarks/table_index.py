"""Measure a table of a million rows: loading it from CSV, memory, and look-ups.

A seeded generator writes two tables of the bf16 product in AITER's columns. ``plain`` has 2,000
pairs of N and K, each on one of four devices, with 500 M: every layer of every model for every
batch.
In ``adversarial`` no two rows share an N and K, a kernel's name, a solidx or an error ratio.
Caching parts of one line therefore does not help with another.

Each load is a separate process; the growth of its peak resident memory is counted from after the
imports. A look-up is the time of `Table.candidates` to its first answer, for shapes of the table
drawn at random:

- ``first``: the first look-up of a shape, which parses the row's line and makes the Row, its Shape
  and its Solution. The first one in each 256th of the table also makes the dict of that part, in
  about a millisecond; the figure is the mean of 2,000.
- ``hit``: a later look-up with the same Shape object, as a dispatcher that keeps it does.
- ``hit of an equal shape``: a later look-up with another, equal Shape, whose hash is not known yet.
- ``miss``: the first look-up of a shape without a row at any M: pinned, exact, finely and coarsely
  padded.

The goals are for ``hit`` and ``miss``. A first look-up parses a line, once a shape, and has no
goal.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness import add_check, head, parser_of, save

HEADER = "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw"
DEVICES = (("gfx942", 304), ("gfx942", 80), ("gfx950", 256), ("sm_90", 132))
M = (*range(1, 257), *range(272, 4097, 16), 8192, 16384, 32768, 65536)

#: what is asked of a million rows, by the name of the figure
GOALS = {"csv_s": 3.0, "csv_mib": 1024.0, "hit_us": 0.5, "miss_us": 3.0}
UNITS = {"csv_s": "load from CSV, s", "csv_mib": "  its memory, MiB"}
UNITS |= {"first_us": "first, us", "hit_us": "hit, us", "equal_us": "hit of an equal shape, us", "miss_us": "miss, us"}
ASKED = 2000


def plain(rows: int) -> Iterator[tuple[str, str]]:
    """Yield key and rest of the lines of the plain table."""
    draw = random.Random(1)
    kernels = [f"_ZN5aiter39bf16gemm_fp32bf16_tn_{tile}x64_splitk_cleanE" for tile in range(32, 161, 16)] + ["auto", "native"]
    for _ in range(-(-rows // len(M))):
        (gfx, units), n, k = draw.choice(DEVICES), 64 * draw.randint(1, 512), 64 * draw.randint(1, 512)
        for m in M:
            us = round(draw.uniform(2, 900), 4)
            rate = f"{round(2e-6 * m * n * k / us, 2)},{round(2e-3 * (m * k + n * k + m * n) / us, 2)}"
            solution = f"{draw.choice(('asm', 'triton', 'torch', 'hipblaslt', 'flydsl'))},{draw.randint(0, 40)},{draw.randint(0, 16)}"
            yield f"{gfx},{units},{m},{n},{k}", f"{solution},{us},{draw.choice(kernels)},{round(draw.random() / 100, 4)},{rate}"


def adversarial(rows: int) -> Iterator[tuple[str, str]]:
    """Yield key and rest of the lines of the adversarial table."""
    draw = random.Random(2)
    for row in range(rows):
        solution = f"triton,{row},{draw.randint(0, 16)},{round(draw.uniform(2, 900), 4)},kernel_{row}_{draw.randint(0, 10**9)}"
        yield f"sm_90,132,{draw.randint(1, 100_000)},{64 * row + 64},{draw.randint(1, 1 << 20)}", f"{solution},{draw.random()},1.0,2.0"


TABLES: dict[str, Callable[[int], Iterator[tuple[str, str]]]] = {"plain": plain, "adversarial": adversarial}


def write(name: str, rows: int, folder: Path) -> Path:
    """Write a table, and next to it the keys that are looked up."""
    path, asked, draw = folder / f"{name}.csv", [], random.Random(3)
    chosen = set(draw.sample(range(rows), min(ASKED, rows)))
    with path.open("w") as file:
        file.write(f"{HEADER}\n")
        for row, (key, rest) in enumerate(itertools.islice(TABLES[name](rows), rows)):
            file.write(f"{key},False,torch.bfloat16,torch.bfloat16,False,False,{rest}\n")
            if row in chosen:
                asked.append(key)
    draw.shuffle(asked)
    path.with_suffix(".asked").write_text("\n".join(asked))
    return path


def look_ups(path: Path, table: Any) -> dict[str, list[float]]:
    """Return microseconds of a look-up; each sample is a mean over all shapes that are looked up."""
    from tunedgemm.device import Device
    from tunedgemm.shape import Shape

    keys = [
        (gfx, int(units), *map(int, sizes))
        for gfx, units, *sizes in (line.split(",") for line in path.with_suffix(".asked").read_text().split())
    ]
    devices = {(gfx, units): Device(gfx, units, "of-this-benchmark") for gfx, units, *_ in keys}

    def shapes(off: int = 0) -> list[tuple[Shape, Device]]:
        return [(Shape("a16w16", m, n + off, k), devices[gfx, units]) for gfx, units, m, n, k in keys]

    def timed(asked: list[tuple[Shape, Device]], *, there: bool) -> float:
        matches, candidates = [None] * len(asked), table.candidates
        start = time.perf_counter()
        for at, (shape, device) in enumerate(asked):
            matches[at] = next(candidates(shape, device), None)
        took = time.perf_counter() - start
        if any((match is not None) is not there for match in matches) or (
            there and any(match.row.shape != s for match, (s, _) in zip(matches, asked, strict=True))
        ):
            raise RuntimeError("look-up: wrong answer; a shape with a row missed, or one without was found")
        return took / len(asked) * 1e6

    known = shapes()
    samples = {"first_us": [timed(known, there=True)], "hit_us": [], "equal_us": [], "miss_us": []}
    for again in range(9):
        samples["hit_us"].append(timed(known, there=True))
        samples["equal_us"].append(timed(shapes(), there=True))
        samples["miss_us"].append(timed(shapes(1 + 2 * again), there=False))  # no row has an odd N
    return samples


def child(path: Path) -> dict[str, Any]:
    """Load the table in this process, and look shapes up."""
    from tunedgemm.ops import op_named
    from tunedgemm.table.lookup import Table

    op = op_named("a16w16")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, processor = time.perf_counter(), time.process_time()
    table = Table.load(op, above=[path])
    took, processor = time.perf_counter() - start, time.process_time() - processor
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {"csv_s": [took], "csv_cpu_s": [processor], "csv_mib": [grown], **look_ups(path, table)}


def measure(name: str, rows: int, folder: Path, repeats: int) -> dict[str, Any]:
    """Return all samples of one table, each load in a fresh process."""
    path = write(name, rows, folder)
    environment = {**os.environ, "TUNEDGEMM_CACHE": str(folder / "cache"), "TUNEDGEMM_HOME": str(folder / "home")}
    samples: dict[str, list[float]] = {}
    for _ in range(repeats):
        command = [sys.executable, __file__, "--child", str(path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        for figure, values in json.loads(done.stdout).items():
            samples.setdefault(figure, []).extend(values)
    path.unlink()
    return {"rows": rows, "best": {figure: min(values) for figure, values in samples.items()}, "samples": samples}


def machine() -> dict[str, Any]:
    """Return what the times depend on: the processor and its load."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {
        "processor": f"{name}, {os.cpu_count()} cores",
        "load_average": os.getloadavg(),
    }


def show(results: dict[str, Any]) -> bool:
    """Print the best and the median of each figure; return whether all goals are met."""
    print("{date}: {processor}, load {load_average[0]:.1f}".format(**results))
    print(f"{'best (median)':28}" + "".join(f"{name:>22}" for name in TABLES) + f"{'goal':>10}")
    met = True
    for figure, label in UNITS.items():
        cells = []
        for table in results["tables"].values():
            best, median = table["best"][figure], statistics.median(table["samples"][figure])
            met = met and best <= GOALS.get(figure, best)
            cells.append(f"{best:,.2f} ({median:,.2f})")
        print(f"{label:28}" + "".join(f"{cell:>22}" for cell in cells) + (f"{GOALS[figure]:>10}" if figure in GOALS else ""))
    return met


def main() -> int:
    """Measure, print and keep every sample; with ``--check`` exit 1 if a goal is missed."""
    parser = parser_of(__doc__)
    add_check(parser)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5, help="processes that load each table (default: %(default)s)")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(child(arguments.child)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        tables = {name: measure(name, arguments.rows, Path(folder), arguments.repeats) for name in TABLES}
    rows = [{"table": name, **table["best"]} for name, table in tables.items()]
    results = head("table_index", **machine(), goals=GOALS, tables=tables, rows=rows)
    met = show(results)
    save(arguments.output, results)
    return 0 if met or not arguments.check else 1


if __name__ == "__main__":
    sys.exit(main())
