"""Replay of a trial log as a bench: the tuner runs in CI on times that were measured on a GPU."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Mapping
from pathlib import Path

import attrs

from tunedgemm.backends.launcher import Launcher
from tunedgemm.device import Device
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import key_shape
from tunedgemm.timing import Timing
from tunedgemm.tuner.log import read_log
from tunedgemm.tuner.trial import Sampler, Samples


def read_trials(path: Path) -> list[Timing]:
    """Return the timings of a trial log, of all its runs, in the order of the file.

    Raises:
        TableError: the file cannot be read, or a line does not belong to a trial log; names the
            line.
    """
    return [line.timing() for line in read_log(path) if line.kind == "trial"]


def read_times(path: Path, like: Shape, status: str = "") -> dict[Shape, dict[tuple[str, str, int], float]]:
    """Return the microseconds of a CSV of trials by shape, then by libtype, kernel and splits.

    Its columns are M, N, K, libtype, kernelName, splitK, us and perhaps scale_order; the shapes'
    other fields are those of *like*. Failures, which took 0, are left out, and so are trials of
    another *status* than a given one. A file ``.gz`` is compressed.
    """
    times: dict[Shape, dict[tuple[str, str, int], float]] = {}
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", newline="") as text:
        for row in csv.DictReader(text):
            if (us := float(row["us"])) and status in ("", row.get("status")):
                shape = attrs.evolve(like, m=int(row["M"]), n=int(row["N"]), k=int(row["K"]))
                if "scale_order" in row:
                    shape = attrs.evolve(shape, extra={"scale_order": row["scale_order"]} if row["scale_order"] else {})
                times.setdefault(shape, {})[row["libtype"], row["kernelName"], int(row["splitK"])] = us
    return times


class Replay:
    """A `Bench` over a trial log: recorded times, or an exception for a solution that did not pass."""

    def __init__(self, path: Path) -> None:
        self._timings = {(key_shape(timing.shape), timing.solution): timing for timing in read_trials(path)}

    def __call__(self, op: Op, shape: Shape, device: Device) -> Sampler:
        """Return the sampler of one shape; op and device are those of the log."""
        del op, device

        def sample(launchers: Mapping[Solution, Launcher], rounds: int) -> dict[Solution, Samples | Exception]:
            return {solution: self._answer(shape, solution, rounds) for solution in launchers}

        return sample

    def _answer(self, shape: Shape, solution: Solution, rounds: int) -> Samples | Exception:
        timing = self._timings.get((key_shape(shape), solution))
        if timing is None:
            return LookupError(f"the log has no trial of {solution} for {shape}")
        if not timing.us:
            return RuntimeError(f"{timing.status}: {timing.detail}")
        return Samples((timing.us,) * rounds, clock_mhz=timing.clock_mhz)
