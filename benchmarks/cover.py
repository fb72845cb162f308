"""Which few kernels serve the shapes of trial logs best: what a backend should list, of whose kernels each costs a compilation.

    TUNEDGEMM_CK_SPACE=full tunedgemm tune --op a8w8 -i shapes.csv -o tuned.csv --libtype cutlass
    python benchmarks/cover.py --libtype cutlass --most 24 tuned.trials.jsonl [other.trials.jsonl ...] [--json cover.json]

Reads trial logs and needs no GPU. A kernel's time is that of its best split. A set of kernels is worth the mean over the shapes of the time
of its best kernel by that of the best of all, in logarithms; a shape that no kernel of a set was right for counts as `MISSED` times slower.
Kernels are taken one after the other, each the one that gains most, and then exchanged one for one while that gains. A line tells what is
lost with the kernels up to it, in the mean and in the worst shape; the last line what is lost by those that the backend lists today.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pandas as pd
from listing import Times, timed
from tunedgemm.backends.registry import Backend, Registry

#: How many times slower a shape counts that a set has no kernel for.
MISSED = 10.0
#: Sums of logarithms that differ by less are the same.
EQUAL = 1e-9


@attrs.frozen
class Choice:
    """A kernel, and what a set loses in the mean and in the worst shape with it and those before it, as a share of the best times."""

    kernel: str
    mean: float
    worst: float


def losses(times: Times) -> pd.DataFrame:
    """The logarithm of each kernel's time, a column, by the best time of each shape, a row: 0 for the best."""
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
    """What each shape loses by a set of kernels; those that were never right are left out."""
    least: pd.Series[float] = given.reindex(columns=list(kernels)).min(axis=1).fillna(math.log(MISSED))
    return least


def cover(given: pd.DataFrame, most: int) -> list[str]:
    """The kernels of at most *most* that lose least, the most useful first, without any that gains nothing."""
    chosen: list[str] = []
    while len(chosen) < most and lost(given, chosen).sum() > EQUAL:
        chosen.append(_next(given, chosen))
    place, kept = 0, 0
    while kept < len(chosen):  # until all in turn are best beside the others
        others = [*chosen[:place], *chosen[place + 1 :]]
        better = _next(given, others)
        if lost(given, [*others, better]).sum() < lost(given, chosen).sum() - EQUAL:
            chosen, kept = [*others[:place], better, *others[place:]], 0
        else:
            kept += 1
        place = (place + 1) % len(chosen)
    return _ordered(given, chosen)


def _next(given: pd.DataFrame, kernels: Sequence[str]) -> str:
    """The kernel that gains most beside others."""
    left = given.drop(columns=list(kernels))
    with_each = np.minimum(left.to_numpy(), lost(given, kernels).to_numpy()[:, None]).sum(axis=0)
    return str(left.columns[with_each.argmin()])


def _ordered(given: pd.DataFrame, kernels: list[str]) -> list[str]:
    """The kernels again, each the one that gains most beside those before it; without those that gain nothing."""
    among, ordered = given[kernels], list[str]()
    while not ordered or lost(among, ordered).sum() > lost(among, kernels).sum() + EQUAL:
        ordered.append(_next(among, ordered))
    return ordered


def told(given: pd.DataFrame, kernels: list[str]) -> list[Choice]:
    """What is lost with the first kernel, the first two, and so on."""
    steps = [(name, lost(given, kernels[: place + 1])) for place, name in enumerate(kernels)]
    return [Choice(name, math.expm1(each.mean()), math.expm1(each.max())) for name, each in steps]


def listed(backend: Backend, times: Times) -> list[str]:
    """The kernels that a backend lists for the shapes as it is set up here."""
    return sorted({solution.kernel_name for device, shape in times for solution in backend.solutions(shape, device)})


def main(arguments: list[str] | None = None) -> int:
    """Print a line a kernel, and one of what is listed today."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path, nargs="+", metavar="LOG")
    parser.add_argument("--libtype", required=True)
    parser.add_argument("--most", type=int, default=24, help="kernels (default: %(default)d)")
    parser.add_argument("--json", type=Path, help="the same, as JSON")
    given = parser.parse_args(arguments)
    times = timed(given.logs, given.libtype)
    backend = Registry().get(given.libtype)
    if not isinstance(backend, Backend):
        parser.error(str(backend))
    if not times:
        parser.error(f"no trial of {given.libtype} in {', '.join(map(str, given.logs))}")
    by_shape = losses(times)
    choices = told(by_shape, cover(by_shape, given.most))
    for number, choice in enumerate(choices, 1):
        print(f"{number:3d} {choice.kernel}: mean loss {choice.mean:.2%}, worst {choice.worst:.1%}")
    today = listed(backend, times)
    last = told(by_shape, today)[-1:]
    for choice in last:
        print(f"{len(today)} listed today: mean loss {choice.mean:.2%}, worst {choice.worst:.1%}, over {len(by_shape)} shapes")
    if given.json:
        found: dict[str, Any] = {"libtype": given.libtype, "shapes": len(by_shape), "kernels": [attrs.asdict(each) for each in choices]}
        found["listed"] = {"kernels": len(today), **{name: getattr(each, name) for each in last for name in ("mean", "worst")}}
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
