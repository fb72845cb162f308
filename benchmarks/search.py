"""Compare the quick and the full search of the tuner: what the quick one loses, tries and takes.

    python benchmarks/search.py --logs h200-2026-11-28/a8w8-trials.csv.gz [...] -o FOLDER

    python benchmarks/search.py --only tune --op a8w8 --shapes list.csv -o FOLDER

replay
    Both searches run over logs of trials, without a GPU. Logs are files of ``benchmarks/results``,
    whose names begin with the op, up to a hyphen. The backends list and refine, the log times.
    "Loss" is the time of the fastest solution that the quick search finds over the fastest of the
    log, less one. So the noise of screening counts as a loss. Solutions without a time in the log
    count as compiled. Backends whose lists need their library are left out.
tune
    Both searches tune the same shapes of an op, each in a separate process with empty compile
    caches. A third process times the two winners of each shape in the same rounds. "Loss" is the
    time of the slower winner over the other's, less one. Goals of the quick search: 3 seconds a
    shape, and a mean loss of 0.5 %. Exit 1 if one is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from harness import add_only, add_rounds, add_shapes, head, parser_of, save, shapes_of
from tunedgemm.backends.backend import Backend
from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device, current_device
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.testing.replay import read_times
from tunedgemm.timing import Timing
from tunedgemm.tuner import tune
from tunedgemm.tuner.screen import screen
from tunedgemm.tuner.search import FULL, QUICK, Further
from tunedgemm.tuner.trial import Options, Outcome, Planned, Samples
from tuner import PAIRED, against, caches, winners

RESULTS = Path(__file__).parent / "results"
LIBTYPES = ("asm", "triton", "skinny", "torch")
SEARCHES, COMPARE = ("quick", "full"), "compare"
GOAL_SECONDS, GOAL_LOSS = 3.0, 0.005
_FP8 = Shape("a8w8", 1, 1, 1, "fp8_e4m3fn", "bf16", scale="row")
#: Fields of the shapes of an op's trials.
LIKE = {
    "a16w16": Shape("a16w16", 1, 1, 1),
    "a8w8": _FP8,
    "a8w8_blockscale": attrs.evolve(_FP8, op="a8w8_blockscale", scale="block", extra={"scale_order": "m_major_padded"}),
}


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


@attrs.frozen
class Replayed:
    """Both searches of a shape.

    Attributes:
        file: the log.
        shape: the shape.
        loss: what the quick search loses.
        quick, full: solutions that each compiles, by libtype.
    """

    file: str
    shape: Shape
    loss: float
    quick: Counter[str]
    full: Counter[str]


def replay(file: str, every: int = 1) -> list[Replayed]:
    """Return both searches of every n-th shape of a log."""
    device = Device("sm_90", 132, "nvidia-h100-80gb-hbm3" if file.startswith("h100") else "nvidia-h200")
    registry = Registry()
    backends = [backend for libtype in LIBTYPES if isinstance(backend := registry.get(libtype), Backend)]
    replayed = []
    read = read_times(RESULTS / file, LIKE[Path(file).name.partition("-")[0]])
    for shape, times in list(read.items())[::every]:
        own = {key: us for key, us in times.items() if key[0] in LIBTYPES}
        searches = {search: ScreenReplay(shape, device, own, backends, search) for search in ("quick", "full")}
        us = {search: each.run() for search, each in searches.items()}
        replayed.append(Replayed(file, shape, us["quick"] / min(own.values()) - 1, searches["quick"].tried, searches["full"].tried))
    return replayed


def row_of(group: dict[str, Any], replayed: list[Replayed]) -> dict[str, Any]:
    """Return the losses of some shapes, and the solutions that a shape compiles."""
    losses = sorted(each.loss for each in replayed)
    compiled = {
        f"{search} {libtype}": round(sum(getattr(each, search)[libtype] for each in replayed) / len(replayed), 1)
        for search in ("full", "quick")
        for libtype in LIBTYPES
    }
    percent = {"mean": statistics.mean(losses), "p95": losses[int(0.95 * (len(losses) - 1))], "worst": losses[-1]}
    return {**group, "shapes": len(losses), **{name: round(100 * loss, 3) for name, loss in percent.items()}, **compiled}


def rows_of(replayed: list[Replayed]) -> list[dict[str, Any]]:
    """Return a row for each log, and one for each of its M."""
    groups: dict[tuple[str, str], list[Replayed]] = {}
    for each in replayed:
        for m in ("all", str(each.shape.m)):
            groups.setdefault((each.file, m), []).append(each)
    return [row_of({"log": file, "M": m}, group) for (file, m), group in groups.items()]


def replays(arguments: argparse.Namespace) -> int:
    """Replay the logs, print a row for each log and each of its M."""
    rows = [row for file in arguments.logs for row in rows_of(replay(file))]
    for row in rows:
        print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    save(arguments.output, head("search", rows=rows), "replay")
    return 0


def searched(arguments: argparse.Namespace, shapes: list[Shape], search: str) -> dict[str, Any]:
    """Tune the shapes by one search; return what it took."""
    begun, ended = 0.0, 0.0

    def progress(_: object, event: object) -> None:
        nonlocal begun, ended
        begun = time.perf_counter() if isinstance(event, Planned) else begun
        ended = time.perf_counter() if isinstance(event, Outcome) else ended

    options = Options(libtype=arguments.libtype, search=search, mp=1, jobs=arguments.jobs, all=True, resume=False)
    outcomes = tune(arguments.op, shapes, arguments.output / f"{search}.csv", options, progress=progress).outcomes
    seconds, tried = Counter[str](), Counter[str]()
    for outcome in outcomes:
        seconds.update(dict(outcome.seconds))  # type: ignore[arg-type]
        tried.update(timing.solution.libtype for timing in outcome.timings)
    return {
        "search": search, "shapes": len(outcomes), "seconds": round((ended - begun) / len(outcomes), 3),
        "activities": {name: round(total / len(outcomes), 3) for name, total in seconds.items()},
        "tried": {libtype: round(count / len(outcomes), 1) for libtype, count in tried.items()},
    }  # fmt: skip


def compared(arguments: argparse.Namespace, shapes: list[Shape]) -> dict[str, Any]:
    """Time the winners of both searches in the same rounds; return the losses of each."""
    quick, full = (winners(arguments.output / f"{search}.csv", arguments.op) for search in SEARCHES)
    device, registry, both = current_device(), Registry(), [shape for shape in shapes if shape in quick and shape in full]
    rows = [against(registry, shape, (quick[shape], full[shape]), device, arguments.rounds) for shape in both]
    losses = {"quick": [row["loss_first"] for row in rows], "full": [row["loss_second"] for row in rows]}
    return {"rows": rows, **{name: {"mean": statistics.mean(own), "worst": max(own)} for name, own in losses.items()}}


def tunings(arguments: argparse.Namespace, words: list[str]) -> int:
    """Tune by both searches and compare the winners, each in a separate process."""

    def step(name: str) -> dict[str, Any]:
        variables = os.environ | ({} if name == COMPARE else caches(arguments.output / f"cache-{name}"))
        done = subprocess.run(
            [sys.executable, __file__, *words, "--step", name], stdout=subprocess.PIPE, text=True, check=True, env=variables
        )
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        print(json.dumps(answer), flush=True)
        return answer

    rows = [step(search) for search in SEARCHES]
    losses = step(COMPARE)
    rows = [{**row, **losses[row["search"]]} for row in rows]
    summary = [
        f"{row['search']}: {row['shapes']} shapes of {arguments.op}, {row['seconds']:.2f} s each, "
        f"mean loss {row['mean']:.2%}, worst {row['worst']:.2%}"
        for row in rows
    ]
    print("\n".join(summary))
    save(arguments.output, head("search", current_device(), summary=summary, rows=rows, winners=losses["rows"]), "tune")
    return int(rows[0]["seconds"] > GOAL_SECONDS or rows[0]["mean"] > GOAL_LOSS)


def main(words: list[str] | None = None) -> int:
    """Replay or tune, or run one step of a tuning."""
    parser = parser_of(__doc__)
    add_only(parser, ("replay", "tune"), ("replay",))
    parser.add_argument("--logs", nargs="+", default=[], metavar="LOG", help="logs to replay")
    add_shapes(parser, "layers", op=True)
    add_rounds(parser, PAIRED)
    parser.add_argument("--libtype", default="all", help="backends to tune (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=0, help="compiling processes; 0 for one on each core")
    parser.add_argument("--step", default="", help=argparse.SUPPRESS)
    words = sys.argv[1:] if words is None else words
    arguments = parser.parse_args(words)
    if "tune" not in arguments.only:
        return replays(arguments)
    if arguments.output is None:
        parser.error("-o FOLDER is required for --only tune: it holds the tables")
    arguments.output.mkdir(parents=True, exist_ok=True)
    shapes = [shape for _, shape in shapes_of(arguments.shapes, arguments.op)]
    if arguments.step:
        step = arguments.step
        print(json.dumps(compared(arguments, shapes) if step == COMPARE else searched(arguments, shapes, step)))
        return 0
    return max(tunings(arguments, words), replays(arguments) if "replay" in arguments.only else 0)


if __name__ == "__main__":
    sys.exit(main())
