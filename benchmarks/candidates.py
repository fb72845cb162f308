"""Judge the solutions that a backend lists for a shape: the first of the list, a small set of
kernels, and compile them ahead of a tuning.

    python benchmarks/candidates.py --libtype triton --first 16 --logs LOG -o folder

    python benchmarks/candidates.py --only cover --libtype cutlass --most 24 --logs LOG -o folder

    TUNEDGEMM_CACHE=ahead python benchmarks/candidates.py --only compile --libtype skinny \\
        --shapes decode

None of it needs a GPU.

first
    Compares the best of the first solutions of the list with the best in the trial logs. A shape's
    list is made for the device that the log names. Large products heat the chip in a race, where
    all take some per cent longer than in the rough rounds: there a loss is off by that. A solution
    that no log timed counts as missing. Exit 1 if fewer than ``--share`` of the shapes
    lose at most ``--within``.
cover
    Chooses the few kernels that would serve the shapes of the logs best, for backends that compile
    each kernel. A kernel's time is that of its best split. A set of kernels loses the mean
    over the shapes of the time of its best kernel over the best of all, in logarithms; a shape that
    no kernel of a set computes counts as `MISSED` times slower. Kernels are chosen greedily, then
    exchanged one for one while that gains. The last row is the set that the backend lists today.
compile
    Compiles the first kernels of a tuning into the cache folder. Copy it to the machine with the
    GPU, and name it there by the same variable. Only the same versions of Triton, torch and NVRTC
    find the kernels again. The tuner reports failures again.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pandas as pd
from harness import add_only, add_shapes, head, parser_of, save, shapes_of
from tunedgemm.backends.registry import Backend, Registry
from tunedgemm.device import Device, device_of_text
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.tuner.compilers import Compilers
from tunedgemm.tuner.log import read_log

#: How many times slower a shape counts that a set has no kernel for.
MISSED = 10.0
#: Sums of logarithms that differ by less are the same.
EQUAL = 1e-9
#: The device that is compiled for by default.
H200 = "sm_90:132:nvidia-h200"

Times = dict[tuple[Device, Shape], dict[Solution, float]]


def timed(logs: Sequence[Path], libtype: str) -> Times:
    """Return the microseconds of each solution of a libtype, by device and shape."""
    times: Times = {}
    for log in logs:
        for line in read_log(log):
            if line.kind == "trial" and (timing := line.timing()).us > 0 and timing.solution.libtype == libtype:
                times.setdefault(line.where(), {})[timing.solution] = timing.us
    return times


def first_row(backend: Backend, device: Device, shape: Shape, us: dict[Solution, float], first: int) -> dict[str, Any]:
    """Return the fastest of all and of the first of the list; ``loss`` is how much slower the
    second is, None without one.
    """
    early = [solution for solution in backend.solutions(shape, device)[:first] if solution in us]
    best, guess = min(us, key=us.__getitem__), min(early, key=us.__getitem__, default=None)
    return {
        "question": "first", "op": shape.op, "M": shape.m, "N": shape.n, "K": shape.k, "timed": len(us), "best": str(best),
        "best_us": us[best], "guess": str(guess), "guess_us": us[guess] if guess else None,
        "loss": us[guess] / us[best] - 1 if guess else None,
    }  # fmt: skip


def judge_first(backend: Backend, times: Times, arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], str, bool]:
    """Return a row for each shape, the verdict, and whether enough shapes are within the loss."""
    rows = [first_row(backend, *where, us, arguments.first) for where, us in times.items()]
    kept = [row for row in rows if row["loss"] is not None and row["loss"] <= arguments.within]
    for row in (row for row in rows if row not in kept):
        guess = "none of the first was timed" if row["loss"] is None else f"of the first {row['guess']} {row['guess_us']:.2f} us"
        print(f"{row['op']} {row['M']} {row['N']} {row['K']}: {row['best']} {row['best_us']:.2f} us, {guess}")
    first = f"the best of the first {arguments.first} of {arguments.libtype}"
    verdict = f"{len(kept)} of {len(rows)} shapes: {first} is within {arguments.within:.0%}"
    return rows, verdict, len(kept) >= arguments.share * len(rows)


@attrs.frozen
class Choice:
    """A kernel, and the mean and worst loss of the set of it and those before it.

    Losses are shares of the best times.
    """

    kernel: str
    mean: float
    worst: float


def losses(times: Times) -> pd.DataFrame:
    """Return the logarithm of each kernel's time (a column) over the best time of each shape (a
    row): 0 for the best.
    """
    rows: list[dict[str, float]] = []
    for us in times.values():
        best: dict[str, float] = {}
        for solution, took in us.items():
            best[solution.kernel_name] = min(took, best.get(solution.kernel_name, math.inf))
        least = min(best.values())
        rows.append({name: math.log(took / least) for name, took in best.items()})
    frame: pd.DataFrame = pd.DataFrame(rows).sort_index(axis=1).fillna(math.log(MISSED))
    return frame


def lost(given: pd.DataFrame, kernels: Sequence[str]) -> pd.Series[float]:
    """Return what each shape loses by a set of kernels; kernels that were never right are left out."""
    least: pd.Series[float] = given.reindex(columns=list(kernels)).min(axis=1).fillna(math.log(MISSED))
    return least


def cover(given: pd.DataFrame, most: int) -> list[str]:
    """Return at most *most* kernels that lose least, the most useful first, without any that gains
    nothing.
    """
    chosen: list[str] = []
    while len(chosen) < most and lost(given, chosen).sum() > EQUAL:
        chosen.append(_next(given, chosen))
    index, kept = 0, 0
    while kept < len(chosen):  # until each in turn is the best addition to the others
        others = [*chosen[:index], *chosen[index + 1 :]]
        better = _next(given, others)
        if lost(given, [*others, better]).sum() < lost(given, chosen).sum() - EQUAL:
            chosen, kept = [*others[:index], better, *others[index:]], 0
        else:
            kept += 1
        index = (index + 1) % len(chosen)
    return _ordered(given, chosen)


def _next(given: pd.DataFrame, kernels: Sequence[str]) -> str:
    """Return the kernel that gains most when added to others."""
    left = given.drop(columns=list(kernels))
    with_each = np.minimum(left.to_numpy(), lost(given, kernels).to_numpy()[:, None]).sum(axis=0)
    return str(left.columns[with_each.argmin()])


def _ordered(given: pd.DataFrame, kernels: list[str]) -> list[str]:
    """Return the kernels in the order in which each gains most after those before it, without those
    that gain nothing.
    """
    among, ordered = given[kernels], list[str]()
    while not ordered or lost(among, ordered).sum() > lost(among, kernels).sum() + EQUAL:
        ordered.append(_next(among, ordered))
    return ordered


def steps(given: pd.DataFrame, kernels: list[str]) -> list[Choice]:
    """Return what is lost with the first kernel, the first two, and so on."""
    lost_with = [(name, lost(given, kernels[: index + 1])) for index, name in enumerate(kernels)]
    return [Choice(name, math.expm1(losses.mean()), math.expm1(losses.max())) for name, losses in lost_with]


def judge_cover(backend: Backend, times: Times, arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    """Return a row for each kernel that is chosen and one for today's list, and the verdict on the
    latter.
    """
    by_shape = losses(times)
    rows = [{"question": "cover", **attrs.asdict(choice)} for choice in steps(by_shape, cover(by_shape, arguments.most))]
    for number, row in enumerate(rows, 1):
        print(f"{number:3d} {row['kernel']}: mean loss {row['mean']:.2%}, worst {row['worst']:.1%}")
    today = sorted({solution.kernel_name for device, shape in times for solution in backend.solutions(shape, device)})
    verdict = f"{len(today)} listed today"
    for choice in steps(by_shape, today)[-1:]:
        verdict += f": mean loss {choice.mean:.2%}, worst {choice.worst:.1%}, over {len(by_shape)} shapes"
        rows.append({"question": "cover", "kernel": f"the {len(today)} listed today", "mean": choice.mean, "worst": choice.worst})
    return rows, verdict


def compile_ahead(backend: Backend, registry: Registry, arguments: argparse.Namespace) -> str:
    """Compile the first solutions of each shape; print those that fail."""
    device, compilers = arguments.device, Compilers(arguments.jobs, registry=registry)
    listed = [shape for _, shape in shapes_of(arguments.shapes, arguments.op) if backend.supports(shape, device) is True]
    work = [(shape, backend.solutions(shape, device)[: arguments.first]) for shape in listed]
    try:
        for shape, solutions in work:
            compilers.begin(shape, solutions, device)
        failed = [timing for shape, solutions in work for timing in compilers.finish(shape, solutions, device)]
    finally:
        compilers.stop()
    for timing in failed:
        print(f"{timing.shape} {timing.solution}: {timing.status}: {timing.detail}")
    return f"{sum(len(solutions) for _, solutions in work)} solutions compiled, {len(failed)} failed"


def main(words: list[str] | None = None) -> int:
    """Answer the questions that were asked for."""
    parser = parser_of(__doc__)
    add_only(parser, ("first", "cover", "compile"), ("first",))
    add_shapes(parser, "decode", op=True)
    parser.add_argument("--logs", type=Path, nargs="+", default=[], metavar="LOG", help="trial logs, for first and cover")
    parser.add_argument("--libtype", required=True)
    parser.add_argument("--first", type=int, default=16, help="solutions from the beginning of a list (default: %(default)d)")
    parser.add_argument("--within", type=float, default=0.05, help="loss that counts as none (default: %(default)g)")
    parser.add_argument("--share", type=float, default=0.9, help="share of the shapes that must be within it (default: %(default)g)")
    parser.add_argument("--most", type=int, default=24, help="kernels to choose, for cover (default: %(default)d)")
    parser.add_argument("--device", type=device_of_text, default=H200, help=f"GFX:CU:NAME to compile for (default: {H200})")
    parser.add_argument("--jobs", type=int, default=0, help="compiling processes; 0 is one for each core (default: %(default)s)")
    arguments = parser.parse_args(words)
    registry = Registry()
    backend = registry.get(arguments.libtype)
    if not isinstance(backend, Backend):
        parser.error(str(backend))
    times = timed(arguments.logs, arguments.libtype)
    if not times and set(arguments.only) - {"compile"}:
        parser.error(f"--logs: no trial of {arguments.libtype} (got {', '.join(map(str, arguments.logs)) or 'no log'})")
    rows, summary, fine = list[dict[str, Any]](), list[str](), True
    if "first" in arguments.only:
        rows, verdict, fine = judge_first(backend, times, arguments)
        summary.append(verdict)
    if "cover" in arguments.only:
        chosen, verdict = judge_cover(backend, times, arguments)
        rows, summary = rows + chosen, [*summary, verdict]
    if "compile" in arguments.only:
        summary.append(compile_ahead(backend, registry, arguments))
    print("\n".join(summary))
    save(arguments.output, head("candidates", libtype=arguments.libtype, summary=summary, rows=rows))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
