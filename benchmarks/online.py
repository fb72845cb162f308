"""Measure how much of a full tuning's gain online tuning in the background has after some seconds.

    python benchmarks/online.py --seconds 60 --shapes llama8b-tp1 --table tuned.csv -o online

Each shape is called in turn, in a loop, for the seconds, with a fresh user folder and
``TUNEDGEMM_ONLINE=background``. Then three launchers of each shape are timed in the same rounds, as
the tuner times them. They are the untuned choice at the start, the solution that serves after the
loop, and the row in ``--table``. Equal solutions are one launcher. A share is (start - after) /
(start - full), of the sum of all shapes and of the mean of logarithms. Without ``--table`` there is
none.

The result also has the seconds at which shapes got their rows. It has the longest pass over all
shapes in milliseconds, before the tuner begins and while it works.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from harness import add_rounds, add_shapes, geometric_mean, head, parser_of, save, shapes_of
from tunedgemm.backends.backend import Backend
from tunedgemm.backends.launcher import Launcher
from tunedgemm.device import current_device
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import UserError
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.tuner.rounds import Workload
from tunedgemm.tuner.trial import Samples

#: Seconds before the tuner begins; its passes are the yardstick of those while it works.
QUIET_S = 2.5
#: Seconds in which the tuner ends without dispatchers.
END_S = 2.0


@attrs.frozen
class Served:
    """What a loop of calls saw.

    Attributes:
        passes: number of passes over all shapes.
        quiet_ms, longest_ms: the longest pass before the tuner began, and after.
        rows_at: seconds at which each further shape had a row.
    """

    passes: int
    quiet_ms: float
    longest_ms: float
    rows_at: list[float]


def serve(gemm: TunedGemm, shapes: Sequence[Shape], seconds: float) -> Served:
    """Call each shape in turn until the seconds are over."""
    device = current_device()
    calls = []
    for shape in shapes:
        op = op_named(shape.op)
        calls.append((gemm.of(shape.op), op.make_inputs(shape, device.torch_device, 0), torch_dtype(shape.outdtype), op.fields(shape)))
    wait = torch.cuda.synchronize if device.index >= 0 else lambda: None
    begun, passes, rows_at, longest = time.perf_counter(), 0, list[float](), [0.0, 0.0]
    while (started := time.perf_counter()) < begun + seconds:
        for dispatcher, operands, otype, fields in calls:
            dispatcher.call(*operands, otype=otype, **fields)
        wait()
        now, passes = time.perf_counter(), passes + 1
        if passes > 1:  # the first one binds
            longest[now > begun + QUIET_S] = max(longest[now > begun + QUIET_S], 1e3 * (now - started))
        served = sum(gemm.of(shape.op).is_bound(shape, device) and gemm.of(shape.op).bound(shape, device).tuned for shape in shapes)
        rows_at += [round(now - begun, 1)] * max(0, served - len(rows_at))
    return Served(passes, *longest, rows_at)


def launcher_of(gemm: TunedGemm, shape: Shape) -> tuple[Solution, Launcher]:
    """Return what serves a shape.

    Raises:
        UserError: it cannot be bound.
    """
    dispatcher, device = gemm.of(shape.op), current_device()
    solution = dispatcher.bound(shape, device).offer.solution
    backend = dispatcher.registry.get(solution.libtype)
    launcher = backend.bind(solution, shape, device) if isinstance(backend, Backend) else backend
    if not isinstance(launcher, Launcher):
        raise UserError(f"{shape}: {solution} does not bind (got {launcher})")
    return solution, launcher


def compare(layer: str, shape: Shape, subjects: dict[str, tuple[Solution, Launcher]], rounds: int) -> dict[str, Any]:
    """Time the launchers of a shape in the same rounds."""
    workload = Workload(op_named(shape.op), shape, current_device(), seed=1)
    answers = workload(dict(subjects.values()), rounds)
    row: dict[str, Any] = {"layer": layer, "M": shape.m, "N": shape.n, "K": shape.k}
    for name, (solution, _) in subjects.items():
        answer = answers[solution]
        if not isinstance(answer, Samples):
            raise UserError(f"{shape}: {solution} cannot be timed (got {answer})")
        row |= {name: str(solution), f"{name}_us": sorted(answer.us)[len(answer.us) // 2], f"samples_{name}": answer.us}
    return row


def shares(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the gains over the start, and the share of the full gain, by sum and by logarithms."""
    start, after = ([row[f"{name}_us"] for row in rows] for name in ("start", "after"))
    result = {"mean_gain": geometric_mean([a / b for a, b in zip(start, after, strict=True)]), "total_gain": sum(start) / sum(after)}
    if all("full_us" in row for row in rows):
        full = [row["full_us"] for row in rows]
        most = geometric_mean([a / b for a, b in zip(start, full, strict=True)])
        result |= {"mean_full_gain": most, "total_full_gain": sum(start) / sum(full)}
        saved = sum(start) - sum(full)
        result |= {"share_of_mean": math.log(result["mean_gain"]) / math.log(most)} if most > 1 else {}
        result |= {"share_of_total": (sum(start) - sum(after)) / saved} if saved > 0 else {}
    return result


def parsed(words: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    add_shapes(parser, "llama8b-tp1", op=True)
    add_rounds(parser, 31)
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds of serving (default: %(default)g)")
    parser.add_argument("--tuning", type=float, default=0.0, metavar="SECONDS", help="TUNEDGEMM_ONLINE_SECONDS; default: those of serving")
    parser.add_argument("--libtype", default="all", help="TUNEDGEMM_ONLINE_LIBTYPE (default: %(default)s)")
    parser.add_argument("--table", type=Path, help="the full tuning's table")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Run the benchmark."""
    options = parsed(words)
    shapes = shapes_of(options.shapes, options.op)
    listed = [shape for _, shape in shapes]
    with tempfile.TemporaryDirectory() as home:
        os.environ["TUNEDGEMM_HOME"] = home
        untuned = TunedGemm(settings=Settings())
        starts = {shape: launcher_of(untuned, shape) for shape in listed}
        online = Settings(background=True, online_seconds=options.tuning or options.seconds, online_libtype=options.libtype)
        gemm = TunedGemm(settings=online)
        served = serve(gemm, listed, options.seconds)
        for dispatcher in gemm.dispatchers:
            dispatcher.background = None
        time.sleep(END_S)
        afters = TunedGemm(settings=Settings())  # its table is what the loop has left
        ends = {shape: launcher_of(afters, shape) for shape in listed}
    full = TunedGemm(settings=Settings(), above={options.op: (options.table,)}) if options.table else None
    rows = []
    for layer, shape in shapes:
        subjects = {"start": starts[shape], "after": ends[shape]} | ({"full": launcher_of(full, shape)} if full else {})
        rows.append(compare(layer, shape, subjects, options.rounds))
        print(
            *[
                f"{name}={value if not isinstance(value, float) else round(value, 2)}"
                for name, value in rows[-1].items()
                if "samples" not in name
            ]
        )
    result = shares(rows)
    summary = [f"{name} {value:.3f}" for name, value in result.items()]
    summary += [f"{len(served.rows_at)} of {len(rows)} shapes with a row, the last at {(served.rows_at or [0])[-1]:g} s"]
    summary += [f"{served.passes} passes, the longest {served.quiet_ms:.2f} ms before the tuner and {served.longest_ms:.2f} ms with it"]
    print("\n".join(summary))
    save(options.output, head("online", rows=rows, summary=summary, serving=attrs.asdict(served), **result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
