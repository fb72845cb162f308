"""Fit the weights by which the plugin `skinny` orders its solutions, and report how well they predict.

::

    python benchmarks/skinny_fit.py --report
    python benchmarks/skinny_fit.py results/…/skinny-trials.csv new.trials.jsonl --report \\
        --compact all.csv --out fitted.json

Reads timings from tables that ``--compact`` writes, as the default is, and from trial logs of the
tuner. Kernels that the plugin refuses, failed timings and those of other devices than ``--device``
are skipped. Of two timings of one solution the last counts, but any other replaces one that was
only screened. Name older files first, and leave out those of kernels that have become faster.

The fit is a ridge regression of log(us / floor) on `features` for each family. A timing weighs more
the closer it is to the best of its shape. The report leaves out one shape at a time, fits the rest,
and orders the timings of that shape as the plugin would. It prints the time of the best of the
first 1, 5, 12 and 24 over the best: the geometric mean and the worst of all shapes. The last table
lists each shape with weights fitted without it. It compares the first timed solution of the list
with F.linear.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import numpy as np
from tunedgemm.device import Device, device_of_text
from tunedgemm.errors import PluginError
from tunedgemm.shape import Shape
from tunedgemm.tuner.log import read_log
from tunedgemm_skinny import cost
from tunedgemm_skinny.names import FAMILIES, parse_name
from tunedgemm_skinny.names import KernelConfig as Kernel
from tunedgemm_skinny.space import enumerate_kernels as choices
from tunedgemm_skinny.space import spread

HERE = Path(__file__).parent
TRIALS = tuple(HERE / "results" / folder / "skinny-trials.csv" for folder in ("h200-2026-11-22", "h200-2026-11-29"))
FITTED = HERE.parent / "plugins" / "skinny" / "tunedgemm_skinny" / "fitted.json"
H200 = "sm_90:132:nvidia-h200"
#: Fields of `Shape.extra`.
EXTRA = ("B", "w_format", "w_group")
FIELDS = ("op", "M", "N", "K", *EXTRA, "dtype", "scale", "kernelName", "splitK", "us")
#: Stands for a kernel's name: F.linear, or torch's own call for the op.
TORCH = "torch"
#: Exponent of a timing's weight: e times as long as the best of its shape and family weighs
#: exp(-_WEIGHT); and the penalty of each squared weight of a feature.
_WEIGHT, _RIDGE = 3.0, 4.0
#: Least spread by which a feature is scaled.
_RARE = 0.5
#: Least timings of a shape that the report leaves out once.
_ENOUGH = 20
_FIRST = (1, 5, 12, 24)
#: First predictions of each family and shape that are compared with their times.
_GUESSED = 8
#: Digits of a weight.
_DIGITS = 6
#: Most rows of x of the classes in which the first prediction is compared with F.linear.
_CLASSES = (1, 2, 4, 8, 16, 32, 64)
#: Most MiB of the weight of these classes.
_MIB = (16, 64, 128, 256, 1024)


Chosen = tuple[Kernel, int]
#: Shape -> solution -> microseconds.
Times = dict[Shape, dict[Chosen, float]]
#: Family -> shape -> logarithm of the time over the prediction.
Hopes = dict[str, dict[Shape, float]]


@attrs.define
class Trials:
    """Timings of kernels with numbers of splits, and of torch's own call, in microseconds."""

    kernels: Times = attrs.field(factory=dict)
    torch: dict[Shape, float] = attrs.field(factory=dict)
    passed: int = 0

    def add(self, shape: Shape, name: str, splits: int, us: float, screened: bool = False) -> None:
        """Add a timing, which replaces an earlier one of the same unless it was only screened."""
        if name == TORCH:
            self.torch[shape] = us
            return
        try:
            kernel = parse_name(name)
        except PluginError:
            self.passed += 1
            return
        times = self.kernels.setdefault(shape, {})
        times[kernel, splits or 1] = times.get((kernel, splits or 1), us) if screened else us


def read(paths: Iterable[Path], device: Device) -> Trials:
    """Read the timings of some files.

    Raises:
        TableError: a trial log cannot be read.
    """
    trials = Trials()
    for path in paths:
        if path.suffix == ".csv":
            _table(path, trials)
        else:
            _log(path, device, trials)
    return trials


def _table(path: Path, trials: Trials) -> None:
    with path.open(newline="") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            extra = {name: text if name == "w_format" else int(text) for name in EXTRA if (text := row.get(name))}
            sizes = int(row["M"]), int(row["N"]), int(row["K"])
            shape = Shape(row["op"], *sizes, dtype=row["dtype"], outdtype="bf16", scale=row["scale"], extra=extra)
            trials.add(shape, row["kernelName"], int(row["splitK"]), float(row["us"]))


def _log(path: Path, device: Device, trials: Trials) -> None:
    for line in read_log(path):
        if line.kind != "trial":
            continue
        timing, solution = line.timing(), line.timing().solution
        native = (solution.libtype, solution.kernel_name) == ("torch", "native")
        screened = timing.status == "screened" and timing.us > 0
        if not (timing.ok or screened) or line.where()[0] != device or not (native or solution.libtype == "skinny"):
            trials.passed += 1
            continue
        of, batch = timing.shape, timing.shape.extra
        shape = Shape(of.op, of.m, of.n, of.k, dtype=of.dtype, outdtype="bf16", scale=of.scale, extra=batch)
        trials.add(shape, TORCH if native else solution.kernel_name, solution.split_k, timing.us, screened)


def compact(trials: Trials, path: Path, device: Device) -> None:
    """Write the table of all timings, in the order of shapes and names."""
    rows = [
        (shape, kernel.name, splits if splits > 1 else 0, us)
        for shape, times in trials.kernels.items()
        for (kernel, splits), us in times.items()
    ]
    rows += [(shape, TORCH, 0, us) for shape, us in trials.torch.items()]
    lines = sorted(
        (
            shape.op,
            shape.m,
            shape.n,
            shape.k,
            *(str(dict(shape.extra).get(name, "")) for name in EXTRA),
            shape.dtype,
            shape.scale,
            name,
            splits,
            f"{us:.3f}",
        )
        for shape, name, splits, us in rows
    )
    with path.open("w", newline="") as file:
        file.write(f"# {device}; {TORCH} is F.linear, or torch's own call for the op\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FIELDS)
        writer.writerows(lines)


@attrs.frozen(eq=False)
class Sums:
    """Weighted sums of one shape and family: features times features, and features times logarithms."""

    products: np.ndarray
    answers: np.ndarray


class Fit:
    """Regression of one family over all shapes, or all but one."""

    def __init__(self, family: str, times: Times, device: Device) -> None:
        """Compute the features of every timing of the family, scaled by their spread."""
        mine = {shape: {at: us for at, us in timed.items() if at[0].family == family} for shape, timed in times.items()}
        rows = {shape: np.array([cost.features(*at, shape, device) for at in timed], float) for shape, timed in mine.items() if timed}
        everything = np.concatenate(list(rows.values()))
        self._spread = everything.std(0)
        # A constant feature has no weight; a rare one is not trusted more than others.
        self._spread = np.where(self._spread < 1e-9, np.inf, np.maximum(self._spread, _RARE))
        self._mean = everything.mean(0)
        self._mean[0], self._spread[0] = 0.0, 1.0
        self._sums = {shape: self._summed(rows[shape], shape, mine[shape], device) for shape in rows}

    def _summed(self, rows: np.ndarray, shape: Shape, times: Mapping[Chosen, float], device: Device) -> Sums:
        scaled = (rows - self._mean) / self._spread
        answers = np.log(np.array(list(times.values())) / cost.floor_of(shape, device))
        weighed = scaled.T * np.exp(-_WEIGHT * (answers - answers.min()))
        return Sums(weighed @ scaled, weighed @ answers)

    def weights(self, without: Shape | None = None) -> np.ndarray:
        """Fit the weight of each feature to all shapes but one."""
        parts = [sums for shape, sums in self._sums.items() if shape != without]
        ridge = _RIDGE * np.eye(len(self._mean))
        ridge[0, 0] = 1e-6
        if not parts:
            return np.zeros(len(self._mean))
        solved = np.linalg.solve(sum(sums.products for sums in parts) + ridge, sum(sums.answers for sums in parts)) / self._spread
        solved[0] -= solved @ self._mean
        return solved


def fit(times: Times, device: Device) -> dict[str, Fit]:
    """Return the regression of each family that was timed."""
    timed = {kernel.family for solutions in times.values() for kernel, _ in solutions}
    return {kind.family: Fit(kind.family, times, device) for kind in FAMILIES if kind.family in timed}


def written(fits: Mapping[str, Fit], trials: Trials, device: Device) -> str:
    """Return the text of the plugin's data file."""
    hopes = hoped(guesses(fits, trials.kernels, device), trials.kernels, device)
    weights = {}
    for family, values in weights_of(fits, hopes).items():
        weights[family] = {name: float(f"{value:.{_DIGITS}g}") for name, value in zip(cost.FEATURES, values, strict=True)}
    counted = sum(map(len, trials.kernels.values()))
    about = f"{counted} timings of {len(trials.kernels)} shapes on {device}; made by benchmarks/skinny_fit.py"
    return json.dumps({"about": about, "weights": weights}, indent=1) + "\n"


def guesses(fits: Mapping[str, Fit], times: Times, device: Device) -> Times:
    """Predict the times of each shape with the weights fitted without it.

    The predictions are logarithms of times over the floor.
    """
    predicted = {}
    for shape, solutions in times.items():
        weights = {family: regression.weights(shape) for family, regression in fits.items()}
        predicted[shape] = {at: float(np.dot(weights[at[0].family], cost.features(*at, shape, device))) for at in solutions}
    return predicted


def hoped(predicted: Times, times: Times, device: Device) -> Hopes:
    """Map each family and shape to the mean excess of its first solutions over their predictions.

    The excess grows with the number of solutions, since the least prediction is chosen.
    """
    beyond: Hopes = {kind.family: {} for kind in FAMILIES}
    for shape, guessed in predicted.items():
        for family, means in beyond.items():
            first = sorted((cost_of, times[shape][at]) for at, cost_of in guessed.items() if at[0].family == family)[:_GUESSED]
            if len(first) == _GUESSED:
                means[shape] = float(np.mean([math.log(us / cost.floor_of(shape, device)) - cost_of for cost_of, us in first]))
    return beyond


def weights_of(fits: Mapping[str, Fit], hopes: Hopes, without: Shape | None = None) -> dict[str, np.ndarray]:
    """Map each family to its weights without one shape, with the mean excess added."""
    weights = {family: regression.weights(without) for family, regression in fits.items()}
    for family, values in weights.items():
        values[0] += _mean(hopes[family], without)
    return weights


def _mean(hopes: Mapping[Shape, float], without: Shape | None = None) -> float:
    means = [mean for shape, mean in hopes.items() if shape != without]
    return float(np.mean(means)) if means else 0.0


def quality(predicted: Mapping[Chosen, float], times: Mapping[Chosen, float]) -> list[float]:
    """Return Spearman's rank correlation, then the time of the best of the first few over the best."""
    order, best = spread(predicted), min(times.values())
    by_guess, by_time = _ranks([predicted[at] for at in times]), _ranks(list(times.values()))
    return [float(np.corrcoef(by_guess, by_time)[0, 1]), *(min(times[at] for at in order[:first]) / best for first in _FIRST)]


def _ranks(values: Sequence[float]) -> np.ndarray:
    ranks = np.empty(len(values))
    ranks[np.argsort(values, kind="stable")] = np.arange(len(values))
    return ranks


def report(trials: Trials, fits: Mapping[str, Fit], device: Device) -> Iterator[str]:
    """Yield the lines of both tables, in Markdown."""
    predicted = guesses(fits, trials.kernels, device)
    hopes = hoped(predicted, trials.kernels, device)
    predicted = {
        shape: {at: guess + _mean(hopes[at[0].family], shape) for at, guess in guessed.items()} for shape, guessed in predicted.items()
    }
    yield "| family | shapes | timings | Spearman | " + " | ".join(f"best of {first}, worst" for first in _FIRST) + " |"
    yield "|---|---|---|---|" + "---|" * len(_FIRST)
    for family in (*fits, "all"):
        results, count = [], 0
        for shape, times in trials.kernels.items():
            mine = {at: us for at, us in times.items() if family in (at[0].family, "all")}
            if len(mine) >= _ENOUGH:
                results.append(quality({at: predicted[shape][at] for at in mine}, mine))
                count += len(mine)
        if results:
            table = np.array(results)
            means = [f"{math.exp(np.log(column).mean()):.3f}, {column.max():.3f}" for column in table.T[1:]]
            yield f"| {family} | {len(results)} | {count} | {table[:, 0].mean():.2f} | {' | '.join(means)} |"
    yield ""
    yield from _first_guesses(trials, fits, hopes, device)


def _first_guesses(trials: Trials, fits: Mapping[str, Fit], hopes: Hopes, device: Device) -> Iterator[str]:
    """Yield the table of first predictions of bf16 against F.linear."""
    gains = {}
    for shape, times in trials.kernels.items():
        if shape.op == "a16w16" and shape in trials.torch and len(times) >= _ENOUGH:
            at = next((at for at in listed(shape, weights_of(fits, hopes, shape), device) if at in times), None)
            gains.update({shape: trials.torch[shape] / times[at]} if at else {})
    yield "| M up to | MiB of the weight up to | shapes of a16w16 | first guess is quicker | F.linear over it, least and median |"
    yield "|---|---|---|---|---|"
    for (below, most), (small, large) in itertools.product(itertools.pairwise((0, *_CLASSES)), itertools.pairwise((0, *_MIB))):
        ratios = [ratio for shape, ratio in gains.items() if below < shape.m <= most and small < shape.n * shape.k / 2**19 <= large]
        if ratios:
            wins = sum(ratio > 1 for ratio in ratios)
            yield f"| {most} | {large} | {len(ratios)} | {wins} | {min(ratios):.3f}, {float(np.median(ratios)):.3f} |"


def listed(shape: Shape, weights: Mapping[str, np.ndarray], device: Device) -> list[Chosen]:
    """List the solutions of a shape as the plugin would with these weights."""
    shipped = cost.weights
    cost.weights = lambda: {family: values.tolist() for family, values in weights.items()}
    try:
        return list(choices(shape, device))
    finally:
        cost.weights = shipped


def main() -> int:
    """Read, fit, write and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="*", type=Path, metavar="LOG", default=TRIALS, help="default: the committed tables")
    parser.add_argument("--device", type=device_of_text, default=H200, help=f"GFX:CU:NAME that the timings are of (default: {H200})")
    parser.add_argument("--out", type=Path, help=f"the data file of the plugin ({FITTED.name})")
    parser.add_argument("--compact", type=Path, help="write one table of all timings")
    parser.add_argument("--report", action="store_true", help="print how good the fit is")
    arguments = parser.parse_args()
    trials = read(arguments.logs, arguments.device)
    if not trials.kernels:
        parser.error(f"no timing of a kernel of skinny on {arguments.device} in {', '.join(map(str, arguments.logs))}")
    fits = fit(trials.kernels, arguments.device)
    print(f"{sum(map(len, trials.kernels.values()))} timings of {len(trials.kernels)} shapes, {trials.passed} skipped")
    if arguments.compact:
        compact(trials, arguments.compact, arguments.device)
    if arguments.out:
        arguments.out.write_text(written(fits, trials, arguments.device))
    for line in report(trials, fits, arguments.device) if arguments.report else ():
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
