"""Replay of a trial log as a bench: the tuner runs in CI on times that were measured on a GPU."""

from __future__ import annotations

import csv
import gzip
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import attrs

from tunedgemm.backends.backend import Backend
from tunedgemm.backends.launcher import Launcher
from tunedgemm.device import Device
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import key_shape
from tunedgemm.timing import Timing
from tunedgemm.tuner.log import read_log
from tunedgemm.tuner.screen import screen
from tunedgemm.tuner.search import FULL, QUICK, Further
from tunedgemm.tuner.trial import Options, Sampler, Samples


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


@attrs.define
class ScreenReplay:
    """The screen of one shape over recorded times: backends list and refine, the log times.

    Attributes:
        shape, device: the shape, and the device of the log.
        times: as of `read_times`.
        backends: those to search if the log times some of their solutions; they need no device.
        search: as of `Options`.
        tried: number of solutions of each libtype that were compiled, with or without a time.
    """

    shape: Shape
    device: Device
    times: Mapping[tuple[str, str, int], float]
    backends: Sequence[Backend]
    search: str = "quick"
    tried: Counter[str] = attrs.field(factory=Counter, init=False)
    _seen: set[Solution] = attrs.field(factory=set, init=False)

    def run(self) -> float:
        """Return the microseconds of the fastest solution that the screen finds; infinity if none."""
        logged = [backend for backend in self.backends if any(libtype == backend.libtype for libtype, *_ in self.times)]
        quick = frozenset(b.libtype for b in logged if self.search == "quick" and b.is_ranked(self.shape.op, self.device))
        lists = dict[str, tuple[Sequence[Solution], Sequence[Solution]]]()
        for backend in logged:
            search = QUICK if backend.libtype in quick else FULL
            lists[backend.libtype] = search.split(backend.solutions(self.shape, self.device)[: search.most or None])

        def rest(libtypes: Collection[str], _: Sequence[Solution]) -> list[Solution]:
            return self._timed([solution for libtype, (_, more) in lists.items() if libtype in libtypes for solution in more])

        checked = self._timed([solution for first, _ in lists.values() for solution in first])
        further = Further(self._neighbours, rest, quick)
        rough = screen(self.shape, checked, self._sample, Options().topk, further, 0.0).rough
        return min(rough.values(), default=math.inf)

    def _timed(self, solutions: Sequence[Solution]) -> list[Solution]:
        """Count solutions as compiled; return those with a time."""
        fresh = [solution for solution in dict.fromkeys(solutions) if solution not in self._seen]
        self._seen.update(fresh)
        self.tried.update(solution.libtype for solution in fresh)
        return [solution for solution in fresh if _key(solution) in self.times]

    def _neighbours(self, leaders: Sequence[Solution]) -> list[Solution]:
        by_libtype = {backend.libtype: backend for backend in self.backends}
        fresh = dict[str, dict[Solution, None]]()
        for leader in leaders:
            near = by_libtype[leader.libtype].refine(leader, self.shape, self.device)
            fresh.setdefault(leader.libtype, {}).update((other, None) for other in near if other not in self._seen)
        quick = QUICK if self.search == "quick" else FULL
        return self._timed([solution for near in fresh.values() for solution in list(near)[: quick.near or None]])

    def _sample(self, solutions: Sequence[Solution], rounds: int) -> dict[Solution, Samples | Timing]:
        return {solution: Samples((self.times[_key(solution)],) * rounds) for solution in solutions}


def _key(solution: Solution) -> tuple[str, str, int]:
    return solution.libtype, solution.kernel_name, solution.split_k
