"""Fit the rates by which the plugin `asm` puts its kernels for Hopper in order to times of many of them.

    tunedgemm tune -i shapes.csv -o tuned.csv -o2 profile.csv --libtype asm
    python benchmarks/asm_fit.py profile.csv [--steps 400] [--leave-out]

The rates are those of `tunedgemm_asm/ptx/cost.py`; what a set of them is worth is the error of the predicted times, fast kernels
counting more, and what the best of the first eight in their order loses. Steps change one rate at random and are kept where that is less.
``--leave-out`` fits without each shape in turn and prints what that shape then loses: whether the fit holds for shapes it has not seen.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
from pathlib import Path

import attrs
from tunedgemm.shape import Shape
from tunedgemm_asm.ptx import cost
from tunedgemm_asm.ptx.plan import Plan, plan_of

RATES = ("_CYCLES_A_US", "_SHARED_BYTES", "_STORED", "_MEMORY", "_L2", "_SM", "_LATENCY", "_LAUNCH", "_MEETING")
MULTIPROCESSORS = 132
#: Solutions from the beginning of a list of which the best counts; what it loses, and what the very first does, over the error of times.
FIRST, OF_FIRST, OF_GUESS = 8, 0.5, 0.2
#: Standard deviation of a step, of the logarithm of a rate.
REACH = 0.25


@attrs.frozen
class Timed:
    """One kernel's time on a shape, in microseconds."""

    plan: Plan
    splits: int
    us: float


Times = dict[Shape, list[Timed]]


def read(path: Path) -> Times:
    """The times of a profile file of 16-bit products, those of the plugin's generated kernels."""
    found: Times = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["libtype"] == "asm" and float(row["us"]) > 0:
                shape = Shape("a16w16", int(row["M"]), int(row["N"]), int(row["K"]))
                found.setdefault(shape, []).append(Timed(plan_of(row["kernelName"]), max(1, int(row["splitK"])), float(row["us"])))
    return found


def judged(shape: Shape, times: list[Timed]) -> tuple[float, float, float]:
    """With the rates as they are: the error of the times, and what the best of the first and the first guess lose."""
    best = min(timed.us for timed in times)
    predicted = sorted((cost.cost(timed.plan, timed.splits, shape, MULTIPROCESSORS), timed.us) for timed in times)
    error = sum(abs(math.log(guess / us)) * (best / us) ** 2 for guess, us in predicted) / len(times)
    return error, min(us for _, us in predicted[:FIRST]) / best - 1, predicted[0][1] / best - 1


def loss(times: Times) -> float:
    """What the rates are worth; 0 is perfect."""
    return sum(error + OF_FIRST * first + OF_GUESS * guess for error, first, guess in (judged(*each) for each in times.items()))


def fit(times: Times, steps: int, seed: int = 0) -> None:
    """Change the rates, for the better."""
    chance, least = random.Random(seed), loss(times)
    for _ in range(steps):
        name = chance.choice(RATES)
        before = getattr(cost, name)
        setattr(cost, name, before * math.exp(chance.gauss(0, REACH)))
        now = loss(times)
        if now < least:
            least = now
        else:
            setattr(cost, name, before)


def show(shape: Shape, times: list[Timed]) -> None:
    """A line for a shape."""
    error, first, guess = judged(shape, times)
    print(f"{shape}: {len(times)} times, error {error:.3f}, best of the first {FIRST} +{first:.1%}, first guess +{guess:.1%}", flush=True)


def main() -> None:
    """Fit and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--leave-out", action="store_true")
    arguments = parser.parse_args()
    times = read(arguments.profile)
    if arguments.leave_out:
        start = {name: getattr(cost, name) for name in RATES}
        for shape, own in times.items():
            for name, rate in start.items():
                setattr(cost, name, rate)
            fit({other: each for other, each in times.items() if other != shape}, arguments.steps)
            show(shape, own)
        return
    fit(times, arguments.steps)
    for shape, own in times.items():
        show(shape, own)
    print(", ".join(f"{name} = {getattr(cost, name):.4g}" for name in RATES))


if __name__ == "__main__":
    main()
