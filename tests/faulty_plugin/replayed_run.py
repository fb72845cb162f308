"""A tuning run with known times, for tests that kill its process.

The process that is killed imports this module.
"""

import gc
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunedgemm.backends.registry import Registry
from tunedgemm.device import device_of
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.testing.fakes import exact, fake_backend, fake_registry
from tunedgemm.testing.replay import Replay
from tunedgemm.timing import Timing
from tunedgemm.tuner import Options, tune

SHAPES = tuple(Shape("a16w16", m, n, 64, "fp32") for n in (32, 48) for m in (1, 3, 4, 9))
FINE = tuple(f"fine{number}" for number in range(5))
BAD = {"zeros": "wrong", "raises": "failed"}


def _call(solution: Solution, shape: Shape, *operands: Any) -> Any:
    if solution.kernel_name == "raises":
        raise RuntimeError("no such kernel image")
    out = exact(solution, shape, *operands)
    return out.zero_() if solution.kernel_name == "zeros" else out


def backends() -> Registry:
    """Return two backends of several solutions each, and torch's."""
    turbo = fake_backend("turbo", solutions=("zeros", *FINE, "raises"), call=_call)
    return fake_registry(turbo, fake_backend("diesel", solutions=FINE[:3], call=_call))


def record(log: Path) -> None:
    """Write a trial log with a time for every solution of every shape.

    Times differ from shape to shape, and are the same in every process.
    """
    lines = []
    for shape in SHAPES:
        for backend in backends().select("all"):
            for solution in backend.solutions(shape, device_of(-1)):
                us = random.Random(f"{shape} {solution}").uniform(5.0, 50.0)
                lines.append(Timing(shape, solution, "ok", us=us, samples=9).to_json())
    log.write_text("\n".join(lines) + "\n")


def run(table: Path, log: Path, shapes: Sequence[Shape] = SHAPES) -> None:
    """Tune into the table with the times of the log, in this process."""
    gc.freeze()  # objects from before the fork are not collected again and again
    tune(shapes=list(shapes), output=table, options=Options(iters=9, warmup=1), registry=backends(), bench=Replay(log))
    sys.stdout.flush()
