"""Are a backend's best guesses good? The best of the first solutions that it lists against the best that a tuning ever timed.

    python benchmarks/listing.py --libtype triton --first 16 tuned.trials.jsonl [other.trials.jsonl ...] [--json listing.json]

Reads trial logs and needs no GPU: a shape's list is made for the device that the log names. What was timed is the list and the
neighbours of its best, most of it roughly, the last few in a race (docs/tuning.md, stages). Large products heat the chip in a race, where
all take some per cent longer than in the rough rounds: there a loss is told too large or too small by that. A solution that the log lacks
counts as not there. Exit 1 where fewer than ``--share`` of the shapes are within ``--within``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tunedgemm.backends.registry import Backend, Registry
from tunedgemm.device import Device
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.tuner.log import read_log

Times = dict[tuple[Device, Shape], dict[Solution, float]]


def timed(logs: list[Path], libtype: str) -> Times:
    """Microseconds of each solution of a libtype, by device and shape."""
    found: Times = {}
    for log in logs:
        for line in read_log(log):
            if line.kind == "trial" and (timing := line.timing()).us > 0 and timing.solution.libtype == libtype:
                found.setdefault(line.where(), {})[timing.solution] = timing.us
    return found


def row(backend: Backend, device: Device, shape: Shape, us: dict[Solution, float], first: int) -> dict[str, Any]:
    """The fastest of all and the fastest of the first of the list; ``loss`` is how much slower the second is, none without one."""
    early = [solution for solution in backend.solutions(shape, device)[:first] if solution in us]
    best, guess = min(us, key=us.__getitem__), min(early, key=us.__getitem__, default=None)
    loss = us[guess] / us[best] - 1 if guess else None
    told = {"op": shape.op, "M": shape.m, "N": shape.n, "K": shape.k, "timed": len(us)}
    return {**told, "best": str(best), "best_us": us[best], "guess": str(guess), "guess_us": us[guess] if guess else None, "loss": loss}


def main(arguments: list[str] | None = None) -> int:
    """Print a line a shape that lost, and the share of those that did not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path, nargs="+", metavar="LOG")
    parser.add_argument("--libtype", required=True)
    parser.add_argument("--first", type=int, default=16, help="solutions from the beginning of a list (default: %(default)d)")
    parser.add_argument("--within", type=float, default=0.05, help="what they may lose (default: %(default)g)")
    parser.add_argument("--share", type=float, default=0.9, help="of the shapes that have to keep it (default: %(default)g)")
    parser.add_argument("--json", type=Path, help="every shape, as JSON")
    given = parser.parse_args(arguments)
    backend = Registry().get(given.libtype)
    if not isinstance(backend, Backend):
        parser.error(str(backend))
    rows = [row(backend, *where, us, given.first) for where, us in timed(given.logs, given.libtype).items()]
    if not rows:
        parser.error(f"no trial of {given.libtype} in {', '.join(map(str, given.logs))}")
    kept = [each for each in rows if each["loss"] is not None and each["loss"] <= given.within]
    for each in rows:
        if each not in kept:
            shape = f"{each['op']} {each['M']} {each['N']} {each['K']}"
            told = "none of the first was timed" if each["loss"] is None else f"of the first {each['guess']} {each['guess_us']:.2f} us"
            print(f"{shape}: {each['best']} {each['best_us']:.2f} us, {told}")
    print(f"{len(kept)} of {len(rows)} shapes: the best of the first {given.first} of {given.libtype} is within {given.within:.0%}")
    if given.json:
        found = {"libtype": given.libtype, "first": given.first, "within": given.within, "shapes": rows}
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if len(kept) >= given.share * len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
