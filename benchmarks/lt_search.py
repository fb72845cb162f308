"""What the search through cuBLASLt's configurations finds, and what it costs.

    python benchmarks/lt_search.py --log lt.jsonl --minutes 9 --json lt.json
    python benchmarks/lt_search.py --log lt.jsonl --random 10 --minutes 9 --json lt.json
    python benchmarks/lt_search.py --log lt.jsonl --again --json lt.json

Each shape is tuned with cuBLASLt alone, in this process, so that the questions to the library can be counted. Then its winner, the
library's first answer, the best of its answers, F.linear, and F.linear again are timed against each other in interleaved rounds.
With ``--random`` small shapes are searched once more: as many configurations as the search timed, ten times over, drawn at random
from all that the library accepts, and the best of them timed against the winner.

A run goes on where its log ends; shapes come in a random order, the same each time, so that what is done is a fair part. A shape that
was begun twice and ended neither time is left out: a configuration of its may end the process. ``--again`` confirms, in a process
that searched nothing: what was found is timed once more.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import attrs
import torch
from speed import AGAIN, DEFAULT, HERE, OP, SLOWER, ceilings, geometric_mean, interval, shapes_of
from tunedgemm.backends.launcher import Launcher
from tunedgemm.backends.registry import Backend, Registry
from tunedgemm.device import Device, current_device
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.tuner import tune
from tunedgemm.tuner.trial import Options, Outcome, Samples
from tunedgemm.tuner.workload import Workload
from tunedgemm_hipblaslt.abi import CUBLASLT
from tunedgemm_hipblaslt.descriptors import Capabilities, Described, Found, asking
from tunedgemm_hipblaslt.launch import LIKED
from tunedgemm_hipblaslt.library import StatusError, loaded
from tunedgemm_hipblaslt.names import FIRST, Algorithm, Name
from tunedgemm_hipblaslt.problem import problem_of
from tunedgemm_hipblaslt.solutions import solution_of

LIBTYPE = CUBLASLT.libtype
WARMUP, ROUNDS, TIMES = 5, 51, 10
GOAL_GAIN, GOAL_SECONDS, GOAL_RANDOM = 1.05, 4.0, 1.01
CHECK = "MatmulAlgoCheck"
#: Draws after which the library accepts too few to go on.
MAX_DRAWS = 200_000
#: Kinds of records, what stands before the kind of one that is begun, and times that one is begun.
KINDS, BEGUN, ATTEMPTS = ("search", "random", "again"), "begun ", 2


class Checks:
    """Counts the questions whether a configuration fits."""

    def __init__(self) -> None:
        functions = loaded(CUBLASLT).functions
        self.count, self._asked = 0, functions[CHECK]
        functions[CHECK] = self._counted  # type: ignore[index]

    def _counted(self, *arguments: Any) -> int:
        self.count += 1
        return int(self._asked(*arguments))


def searched(shape: Shape, registry: Registry, checks: Checks) -> Outcome:
    """Tune one shape with cuBLASLt alone, in this process."""
    found: list[Outcome] = []

    def progress(_: object, event: object) -> None:
        if isinstance(event, Outcome):
            found.append(event)

    checks.count = 0
    with tempfile.TemporaryDirectory() as folder:
        options = Options(libtype=LIBTYPE, all=True, resume=False, mp=1)
        tune(OP.name, [shape], Path(folder) / "tuned.csv", options, registry=registry, progress=progress)
    return found[0]


def compared(backend: Backend, shape: Shape, device: Device, solutions: dict[str, Solution]) -> dict[str, Any]:
    """Samples of named solutions of cuBLASLt, of F.linear and of F.linear again, over the same rounds."""
    launchers = {DEFAULT: Launcher(torch.nn.functional.linear), AGAIN: Launcher(torch.nn.functional.linear)}
    for solution in solutions.values():
        launcher = backend.bind(solution, shape, device)
        if isinstance(launcher, Launcher):
            launchers[solution] = launcher
    workload = Workload(OP, shape, device, seed=1)
    workload(launchers, WARMUP)
    answers = workload(launchers, ROUNDS)
    named = {"default": DEFAULT, "again": AGAIN, **solutions}
    return {name: answers[each].us for name, each in named.items() if isinstance(answers.get(each), Samples)}


def record_of(shape: Shape, registry: Registry, device: Device, checks: Checks) -> dict[str, Any]:
    """Search and comparison of one shape."""
    backend = registry.get(LIBTYPE)
    assert isinstance(backend, Backend), backend
    started = time.perf_counter()
    outcome = searched(shape, registry, checks)
    seconds, asked = time.perf_counter() - started, checks.count
    answers = backend.solutions(shape, device)
    # Rough times are the shortest of few, and so below the medians of those that went on.
    us = {timing.solution: (timing.status != "ok", timing.us) for timing in outcome.timings if timing.us and timing.solution in answers}
    # Not by its configuration, which need not be all that an answer holds.
    names = {"first": Solution(LIBTYPE, FIRST), "best_answer": min(us, key=us.__getitem__, default=answers[0])}
    names |= {"winner": outcome.winner.solution} if outcome.winner else {}
    samples = compared(backend, shape, device, names)
    return {
        "kind": "search", "shape": shape.to_dict(), "checks": asked, "same_bytes": same_bytes(shape, device),
        "tried": len(outcome.timings), "answers": len(answers),
        "seconds": seconds, "stages_s": dict(outcome.seconds), "device_s": dict(outcome.seconds).get("device", 0.0),
        "solutions": {name: solution.to_dict() for name, solution in names.items()},
        "outside": "winner" in names and names["winner"] not in answers, "samples": samples,
    }  # fmt: skip


def same_bytes(shape: Shape, device: Device) -> tuple[int, int]:
    """How many of the library's answers their names make again byte for byte, and how many there are."""
    with asking(loaded(CUBLASLT), problem_of(shape), device.index) as described:
        answers = described.answers(LIKED, CUBLASLT.workspace)
        return sum(described.initialised(described.configured(answer.algo)) == answer.algo for answer in answers), len(answers)


def fitting(described: Described, number: int, able: Capabilities) -> Iterator[Algorithm]:
    """Every tile with every stages that the library accepts by themselves; Hopper's algorithms want a cluster named, if of one block."""
    for tile, stages in itertools.product(able.tiles, able.stages):
        for cluster in (0, 2):
            plain = Algorithm(id=number, tile=tile, stages=stages, cluster=cluster)
            if isinstance(described.check(plain), Found):
                yield plain
                break


def drawn(described: Described, count: int, dice: random.Random) -> list[Algorithm]:
    """So many different configurations, drawn at random from all that the library accepts.

    Tile and stages come from the pairs that it accepts by themselves: of any two drawn at random it accepts one in hundreds.
    """
    limit, able, pairs = described.library.abi.workspace, {}, {}
    for number in described.numbers():
        with contextlib.suppress(StatusError):  # an algorithm that does not tell what it can
            able[number] = one = described.capabilities(number)
            pairs[number] = list(fitting(described, number, one))
    numbers = [number for number, found in pairs.items() if found]
    found: dict[Algorithm, None] = {}
    for _ in range(MAX_DRAWS):
        if len(found) >= count:
            break
        start = dice.choice(pairs[dice.choice(numbers)])
        one = able[start.id]
        parts = dice.choice((1, 1, 2, 3, 4, 6, 8, 12, 16)) if one.split_k else 1
        ways = [way for way in (1, 2, 4) if one.reductions & way] or [0]
        algorithm = attrs.evolve(
            start, split_k=parts, reduction=dice.choice(ways) if parts > 1 else 0, swizzle=dice.randint(0, one.swizzles),
            option=dice.randint(0, one.options), cluster=dice.choice((0, *range(2, 10))),
        )  # fmt: skip
        answer = described.check(algorithm)
        if isinstance(answer, Found) and answer.workspace <= limit:
            found[algorithm] = None
    return list(found)


def random_record(record: dict[str, Any], registry: Registry, device: Device) -> dict[str, Any]:
    """The best of ten times as many random configurations against the search's winner."""
    shape, winner = Shape.from_dict(record["shape"]), Solution.from_dict(record["solutions"]["winner"])
    backend, library = registry.get(LIBTYPE), loaded(CUBLASLT)
    assert isinstance(backend, Backend), backend
    with asking(library, problem_of(shape), device.index) as described:
        algorithms = drawn(described, TIMES * record["tried"], random.Random(0))
    solutions = [solution_of(library, Name(algorithm)) for algorithm in algorithms]
    workload, us = Workload(OP, shape, device, seed=1), {}
    for start in range(0, len(solutions), 100):
        launchers = {each: backend.bind(each, shape, device) for each in solutions[start : start + 100]}
        answers = workload({each: one for each, one in launchers.items() if isinstance(one, Launcher)}, 3)
        us |= {each: min(answer.us) for each, answer in answers.items() if isinstance(answer, Samples)}
        workload.forget({})
    best = min(us, key=us.__getitem__)
    samples = compared(backend, shape, device, {"winner": winner, "random": best})
    ratio = interval([a / b for a, b in zip(samples["winner"], samples["random"], strict=True)])
    return {"kind": "random", "shape": record["shape"], "timed": len(us), "best": best.to_dict(), "ratio": ratio}


def again_record(record: dict[str, Any], registry: Registry, device: Device) -> dict[str, Any]:
    """What a search found, timed once more."""
    shape, backend = Shape.from_dict(record["shape"]), registry.get(LIBTYPE)
    assert isinstance(backend, Backend), backend
    names = {name: Solution.from_dict(solution) for name, solution in record["solutions"].items()}
    samples = compared(backend, shape, device, names)
    gain = interval([a / b for a, b in zip(samples["default"], samples["winner"], strict=True)])
    return {"kind": "again", "shape": record["shape"], "over_linear": gain}


def read_log(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Records by kind and shape."""
    found: dict[str, dict[str, dict[str, Any]]] = {kind: {} for kind in (*KINDS, *(BEGUN + kind for kind in KINDS))}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # torn when the last run was stopped
        kind, key = record["kind"], json.dumps(record["shape"], sort_keys=True)
        times = found[kind].get(key, {}).get("times", 0) + 1
        found[kind][key] = {**record, "times": times} if kind.startswith(BEGUN) else record
    return found


def row_of(record: dict[str, Any]) -> dict[str, Any]:
    """Gains of one shape: medians of the ratios of each round, with their intervals."""
    samples, shape = record["samples"], record["shape"]

    def gain(over: str, name: str) -> tuple[float, float, float]:
        return interval([a / b for a, b in zip(samples[over], samples[name], strict=True)])

    return {
        "M": shape["m"], "N": shape["n"], "K": shape["k"], "winner": str(Solution.from_dict(record["solutions"]["winner"])),
        "over_linear": gain("default", "winner"), "over_first": gain("first", "winner"), "over_answers": gain("best_answer", "winner"),
        "control": gain("default", "again"), "outside": record["outside"], "checks": record["checks"], "tried": record["tried"],
        "device_s": record["device_s"], "seconds": record["seconds"], "same_bytes": record["same_bytes"],
    }  # fmt: skip


def summarise(rows: list[dict[str, Any]], randoms: list[dict[str, Any]], agains: list[dict[str, Any]]) -> list[str]:
    """The lines that are printed and that the committed result carries."""
    lines = []
    for m in sorted({row["M"] for row in rows}):
        mine = [row for row in rows if row["M"] == m]
        means = {over: geometric_mean([row[f"over_{over}"][0] for row in mine]) for over in ("linear", "first", "answers")}
        slowest = min(row["over_linear"][0] for row in mine)
        over = f"{means['linear']:.3f} over F.linear (slowest {slowest:.3f}), {means['first']:.3f} over the first answer"
        best = f"{means['answers']:.3f} over the best answer"
        lines.append(f"M={m}: {len(mine)} shapes, geometric mean {over}, {best}; {sum(row['outside'] for row in mine)} outside the answers")
    middle = [row["over_linear"][0] for row in rows if 16 <= row["M"] <= 1024]
    slower = [row for row in rows if row["over_linear"][2] < SLOWER]
    lines.append(f"16 <= M <= 1024: geometric mean {geometric_mean(middle):.3f} (goal {GOAL_GAIN}); slower than F.linear: {len(slower)}")
    share = sum(row["outside"] for row in rows) / len(rows)
    most, checks = max(row["device_s"] for row in rows), sorted(row["checks"] for row in rows)
    lines.append(
        f"winners outside the answers {share:.0%}; checks a shape {checks[len(checks) // 2]} (most {checks[-1]}); seconds in samples "
        f"a shape {sum(row['device_s'] for row in rows) / len(rows):.2f} (most {most:.2f}, goal {GOAL_SECONDS:g}), seconds in all "
        f"{sum(row['seconds'] for row in rows) / len(rows):.2f} (most {max(row['seconds'] for row in rows):.2f})"
    )
    same, answers = (sum(row["same_bytes"][place] for row in rows) for place in (0, 1))
    lines.append(f"answers that their names make again byte for byte: {same} of {answers}")
    if randoms:
        worst = max(record["ratio"][0] for record in randoms)
        lines.append(f"against {TIMES} times as many at random on {len(randoms)} shapes: at worst {worst:.3f} (goal {GOAL_RANDOM})")
    if agains:
        gains = [record["over_linear"][0] for record in agains if 16 <= record["shape"]["m"] <= 1024]
        slower = sum(record["over_linear"][2] < SLOWER for record in agains)
        mean = geometric_mean(gains)
        lines.append(
            f"in a second process, {len(agains)} shapes: {mean:.3f} over F.linear for 16 <= M <= 1024; slower than F.linear: {slower}"
        )
    return lines


def main() -> int:
    """Go on with the log and print the totals; exit 3 where shapes are left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, required=True, help="JSON lines: what is done")
    parser.add_argument("--json", type=Path, help="write the totals and a row for each shape")
    parser.add_argument("--shapes", type=Path, default=HERE / "shapes.csv")
    parser.add_argument("--subset", default="layers", help="subset of the shapes file; empty for all")
    parser.add_argument("--random", type=int, default=0, help="search the smallest so many shapes at random, too")
    parser.add_argument("--again", action="store_true", help="search nothing: time once more what was found")
    parser.add_argument("--minutes", type=float, default=0.0, help="begin nothing after this time; 0 is no limit")
    arguments = parser.parse_args()
    until = time.monotonic() + (arguments.minutes * 60 or float("inf"))
    device, registry, checks = current_device(), Registry(), Checks()
    listed = shapes_of(arguments.subset, arguments.shapes)
    random.Random(0).shuffle(listed)
    shapes = {json.dumps(shape.to_dict(), sort_keys=True): shape for _, shape in listed}

    def keep(record: dict[str, Any]) -> None:
        with arguments.log.open("a") as file:
            file.write(json.dumps(record) + "\n")
        torch.cuda.empty_cache()

    def left(kind: str) -> list[str]:
        done = read_log(arguments.log)
        wanted = list(shapes)
        if kind != "search":
            wanted = [key for key in shapes if "winner" in done["search"].get(key, {}).get("solutions", {})]
        if kind == "random":
            wanted = sorted(wanted, key=lambda key: shapes[key].n * shapes[key].k * max(shapes[key].m, 64))[: arguments.random]
        begun = done[BEGUN + kind]
        return [key for key in wanted if key not in done[kind] and begun.get(key, {}).get("times", 0) < ATTEMPTS]

    kinds = ("again",) if arguments.again else ("search", "random")
    for kind in kinds:
        while time.monotonic() < until and (keys := left(kind)):
            keep({"kind": BEGUN + kind, "shape": shapes[keys[0]].to_dict()})
            if kind == "search":
                keep(record_of(shapes[keys[0]], registry, device, checks))
                continue
            record = read_log(arguments.log)["search"][keys[0]]
            keep((random_record if kind == "random" else again_record)(record, registry, device))
    done = read_log(arguments.log)
    rows = [row_of(done["search"][key]) for key in shapes if "winner" in done["search"].get(key, {}).get("solutions", {})]
    randoms, agains = (list(done[kind].values()) for kind in ("random", "again"))
    lines = [f"{len(rows)} of {len(shapes)} shapes", *(summarise(rows, randoms, agains) if rows else [])]
    print("\n".join(lines))
    if arguments.json:
        versions = {**dict(device.versions), LIBTYPE: registry.get(LIBTYPE).library_version(device)}
        head = {"date": datetime.now(timezone.utc).date().isoformat(), "device": str(device), "versions": versions}
        content = {**head, "ceilings": ceilings(), "summary": lines, "rows": rows, "random": randoms, "again": agains}
        arguments.json.write_text(json.dumps(content))
    return 3 if any(left(kind) for kind in kinds) else 0


if __name__ == "__main__":
    sys.exit(main())
