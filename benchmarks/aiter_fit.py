"""Fit the rates that order CK's block-scaled instances on AMD GPUs to AITER's tables, and judge them.

    python benchmarks/aiter_fit.py --configs AITER/aiter/configs [--steps 3000] [-o FOLDER]

A table holds the fastest kernel of each shape and its time. The fit lowers the errors of these
times, the predicted losses of the winners, and their ranks. Each layer (N, K) has the same weight
in each band of M, because tables have thousands of rows of few layers. A layer's rows are predicted
by rates that were fitted without it, or, between tables, without its whole table.

AITER's default is the instance that its launcher runs without a row. A table has no times of
slower kernels. So a choice's loss is known only as a bound: the time of a row of the same layer,
with at least as many rows of x, whose winner is that choice.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from harness import parser_of
from tunedgemm.device import Device
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.table.csvfile import read_rows
from tunedgemm_ck.xdl import cost, fitted_cost, limits, space
from tunedgemm_ck.xdl.names import XdlInstance

DEVICES = (Device("gfx942", 304), Device("gfx950", 256))
BANDS = (16, 64, 256, 1024, 4096, math.inf)
#: Rows of a layer and a band of M that are fitted at most; folds of layers.
MOST, FOLDS = 8, 5
#: AITER's instance for shapes without a row.
DEFAULT = ("a8w8_blockscale_1x128x128_256x16x128x256_16x16_16x16_1x2_16x16x1_16x16x1_1x16x1x16_8_1x2_intrawave_v1", 0)
#: Where the search begins; fractions are clipped to 0 and 1, all else changes by factors.
BEGIN = fitted_cost.Rates(1.5, 1, 0.3, 1.7, 1.4e-5, 4e6, 6e4, 2e4, 5e6, 3e6, 3e5, 0.15, 0.3, 0.2, {})
FRACTIONS = ("serial", "overlap", "whole")
NOTES = """
No kernel ran here: AITER's authors measured the times, on GPUs that we do not have.

- first, in 4, in 8: how often the row's winner is that near to the list's beginning. trials: up to
  the winner; inf if it is not listed. Each layer (N, K) has one vote in each band of M (to 16, 64,
  256, 1024, 4096, more); by rows each row has one.
- by clocks: the order of other ops and devices. AITER's default: its instance for shapes without a row.
- loss at most: the time of a row of the layer with at least as many rows of x that the first choice
  won, over the row's. bound known: for how many rows there is one.
"""
#: Weight of a winner's rank in the loss, and of the squared logarithms of factors.
OF_RANK, OF_FACTORS = 0.02, 0.03


@attrs.frozen
class Measured:
    """A row: its table, shape, fastest kernel and microseconds."""

    table: str
    shape: Shape
    winner: tuple[str, int]
    us: float

    @property
    def group(self) -> tuple[str, int, int, int]:
        """Return the table, the layer and the band of M."""
        band = next(number for number, most in enumerate(BANDS) if self.shape.m <= most)
        return self.table, self.shape.n, self.shape.k, band


def read(folder: Path, device: Device) -> list[Measured]:
    """Return the rows of listed instances of the op on a device."""
    op, names, rows = op_named(fitted_cost.OP), {each.name for each in _instances()}, []
    for path in sorted(folder.rglob(f"{op.name}_tuned_gemm*.csv")):
        for row in read_rows(path, op)[0]:
            if row.valid and (row.gfx, row.cu_num) == (device.gfx, device.cu_num) and row.solution.kernel_name in names:
                rows.append(Measured(path.stem, row.shape, (row.solution.kernel_name, row.solution.split_k), row.us))
    return rows


def _instances() -> tuple[XdlInstance, ...]:
    return space.listed_instances(fitted_cost.OP)


def _candidates() -> list[tuple[XdlInstance, int]]:
    return [(instance, split) for instance in _instances() for split in range(limits.MOST_SPLIT + 1)]


@attrs.frozen(eq=False)
class Times:
    """Rows as arrays: rows down, candidates across; *fits* says which candidates are listed."""

    work: fitted_cost.Work
    fits: Any
    winner: Any
    us: Any
    weight: Any

    @classmethod
    def of(cls, rows: list[Measured], device: Device) -> Times:
        """Return the arrays of some rows."""
        candidates = _candidates()
        tiles = np.array([instance.sides for instance, _ in candidates], float).T
        parts = np.array([1 << split for _, split in candidates], float)
        resident = np.array([fitted_cost.resident_blocks(instance, device.gfx) for instance, _ in candidates], float)
        m, n, k = np.array([(row.shape.m, row.shape.n, row.shape.k) for row in rows], float).T[:, :, None]
        work = fitted_cost.Work(m, n, k, *tiles, parts, float(device.cu_num), resident, 1.0)
        column = {(instance.name, split): number for number, (instance, split) in enumerate(candidates)}
        fits = np.zeros((len(rows), len(candidates)), bool)
        for number, row in enumerate(rows):
            for instance, split in space.enumerate_instances(row.shape, device, True):
                fits[number, column[instance.name, split]] = True
        counts = Counter(row.group for row in rows)
        weight = np.array([1 / counts[row.group] for row in rows])
        return cls(work, fits, np.array([column[row.winner] for row in rows]), np.array([row.us for row in rows]), weight)

    def predict(self, rates: fitted_cost.Rates) -> tuple[Any, Any]:
        """Return the predicted times of all candidates, and of the winners; infinite if not listed."""
        factors = np.array([rates.factors.get(fitted_cost.tile_of(instance), 1.0) for instance, _ in _candidates()])
        us = np.where(self.fits, fitted_cost.predict_us(rates, attrs.evolve(self.work, factor=factors)), np.inf)
        return us, us[np.arange(len(us)), self.winner]


def loss(rates: fitted_cost.Rates, times: Times) -> float:
    """Return the loss of some rates; 0 is perfect."""
    us, won = times.predict(rates)
    known = np.isfinite(won)
    error = np.minimum(abs(np.log(won[known] / times.us[known])), 1)
    gap = np.minimum(np.log(won[known] / us[known].min(1)), 0.5)
    rank = np.minimum((us[known] < won[known][:, None] * 0.999).sum(1), 8)
    factors = sum(math.log(factor) ** 2 for factor in rates.factors.values())
    return float(np.average(error + gap + OF_RANK * rank, weights=times.weight[known])) + OF_FACTORS * factors


def fit(rows: list[Measured], device: Device, steps: int, seed: int = 0) -> fitted_cost.Rates:
    """Return the best rates of a random search."""
    chance, times = np.random.default_rng(seed), Times.of(_sampled(rows), device)
    rates = attrs.evolve(BEGIN, factors={fitted_cost.tile_of(instance): 1.0 for instance in _instances()})
    least = loss(rates, times)
    names = [*attrs.asdict(BEGIN, recurse=False)][:-1] + list(rates.factors)
    for step in range(steps):
        trial, reach = rates, 0.35 * (1 - 0.9 * step / steps)
        for number in chance.choice(len(names), chance.integers(1, 3), replace=False):
            trial = _changed(trial, names[number], float(chance.normal(0, reach)))
        if (now := loss(trial, times)) < least:
            rates, least = trial, now
    return rates


def _changed(rates: fitted_cost.Rates, name: Any, step: float) -> fitted_cost.Rates:
    if not isinstance(name, str):
        return attrs.evolve(rates, factors={**rates.factors, name: rates.factors[name] * math.exp(step)})
    before = getattr(rates, name)
    after = min(max(before + step / 2, 0.0), 1.0) if name in FRACTIONS else before * math.exp(step)
    return attrs.evolve(rates, **{name: after})


def _sampled(rows: list[Measured]) -> list[Measured]:
    """Return at most `MOST` rows of each group, at equal distances in M."""
    groups = defaultdict[Any, list[Measured]](list)
    for row in sorted(rows, key=lambda row: row.shape.m):
        groups[row.group].append(row)
    return [own[number * len(own) // min(MOST, len(own))] for own in groups.values() for number in range(min(MOST, len(own)))]


@attrs.frozen(eq=False)
class Judged:
    """Predictions for rows: errors of times, ranks of winners (infinite if not listed), weights of
    rows and losses of the first choice as bounds.
    """

    error: Any
    rank: Any
    weight: Any
    bounds: Any

    def cells(self) -> list[str]:
        """Return the table's cells: errors, then ranks by layers and bands, and by rows."""
        known = np.isfinite(self.error)
        cells = [f"{_quantile(self.error[known], self.weight[known], of):.1%}" for of in (0.5, 0.9)] if known.any() else ["", ""]
        for weight in (self.weight, np.ones(len(self.rank))):
            cells += [f"{np.average(self.rank <= most, weights=weight):.1%}" for most in (1, 4, 8)]
            cells.append(" / ".join(f"{_quantile(self.rank, weight, of):.0f}" for of in (0.5, 0.9)))
        known = np.isfinite(self.bounds)
        bound = f"{np.median(self.bounds[known]):.1%} / {np.quantile(self.bounds[known], 0.9):.1%}" if known.any() else ""
        return [*cells, f"{known.mean():.0%}", bound]


def _quantile(values: Any, weights: Any, share: float) -> float:
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(total, share * total[-1])])


def judge(rows: list[Measured], device: Device, rates: fitted_cost.Rates) -> Judged:
    """Judge rates by some rows."""
    times = Times.of(rows, device)
    us, won = times.predict(rates)
    candidates = [(instance.name, split) for instance, split in _candidates()]
    first = [candidates[number] for number in us.argmin(1)]
    rank = np.where(np.isfinite(won), 1 + (us < won[:, None]).sum(1), np.inf)
    return Judged(abs(won / times.us - 1), rank, times.weight, _bounds(rows, first))


def _bounds(rows: list[Measured], first: list[tuple[str, int]]) -> Any:
    """Return bounds of what first choices lose, infinite where no row has one."""
    by_layer = defaultdict[Any, list[tuple[int, float]]](list)
    for row in rows:
        by_layer[row.table, row.shape.n, row.shape.k, row.winner].append((row.shape.m, row.us))
    bounds = []
    for row, choice in zip(rows, first, strict=True):
        larger = [us for m, us in by_layer[row.table, row.shape.n, row.shape.k, choice] if m >= row.shape.m]
        bounds.append(max(min(larger, default=math.inf) / row.us - 1, 0.0))
    return np.array(bounds)


def fixed(rows: list[Measured], ranks: list[float], first: list[tuple[str, int]]) -> Judged:
    """Judge an order without times."""
    counts = Counter(row.group for row in rows)
    weight = np.array([1 / counts[row.group] for row in rows])
    return Judged(np.full(len(rows), np.inf), np.array(ranks, float), weight, _bounds(rows, first))


def joined(parts: list[Judged]) -> Judged:
    """Return the predictions of several folds as one."""
    return Judged(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("error", "rank", "weight", "bounds")))


def folds(rows: list[Measured]) -> Iterator[tuple[list[Measured], list[Measured]]]:
    """Yield rows to fit and rows to judge: the latter's layers are not among the former's."""
    layers = sorted({row.group[1:3] for row in rows})
    order = np.random.default_rng(0).permutation(len(layers))
    fold: Mapping[Any, int] = {layers[number]: place % FOLDS for place, number in enumerate(order)}
    for own in range(FOLDS):
        yield [row for row in rows if fold[row.group[1:3]] != own], [row for row in rows if fold[row.group[1:3]] == own]


def before(rows: list[Measured], device: Device) -> Judged:
    """Judge the order by clocks, which other ops and devices have."""
    ranks, first = [], []
    for row in rows:
        names = [
            (instance.name, split)
            for instance, split in cost.order_fitting(_instances(), limits.unfit_sizes, limits.MOST_SPLIT, row.shape, device, False)
        ]
        ranks.append(names.index(row.winner) + 1 if row.winner in names else math.inf)
        first.append(names[0])
    return fixed(rows, ranks, first)


def always(rows: list[Measured], choice: tuple[str, int]) -> Judged:
    """Judge one instance for all shapes."""
    return fixed(rows, [1 if row.winner == choice else math.inf for row in rows], [choice] * len(rows))


def torch_shares(rows: list[Measured], device: Device) -> str:
    """Return the share of rows that the backend answers untuned, and of which the measured winner
    takes less than `torch_least_us`.
    """
    answered = [row for row in rows if next(iter(space.enumerate_untuned(row.shape, device)), None)]
    right = sum(row.us < fitted_cost.torch_least_us(row.shape, device) for row in answered)
    return f"{len(answered) / len(rows):.0%} of the rows; in {right / max(len(answered), 1):.1%} of these the row's time is less"


def default_line(rows: list[Measured], device: Device, rates: fitted_cost.Rates) -> str:
    """Return what AITER's default and the first choice without splits take by the prediction."""
    times, candidates = Times.of(rows, device), [(instance.name, split) for instance, split in _candidates()]
    us, _ = times.predict(rates)
    unsplit = us[:, [number for number, (_, split) in enumerate(candidates) if split == 0]].min(1)
    fits = np.isfinite(us[:, candidates.index(DEFAULT)])
    texts = []
    for predicted in (us[:, candidates.index(DEFAULT)], unsplit):
        ratio, weight = predicted[fits] / times.us[fits], times.weight[fits]
        texts.append(" / ".join(f"{_quantile(ratio, weight, of):.2f}" for of in (0.5, 0.9)))
    known = fits & (times.winner == candidates.index(DEFAULT))
    first = us.argmin(1)[known] == candidates.index(DEFAULT)
    return (
        f"By the prediction AITER's default takes {texts[0]} times the row's time (median / 90 %), the first choice "
        f"without splits {texts[1]} times. The default won {known.sum()} rows; it is the first choice for {first.sum()} of them."
    )


HEAD = (
    "| order | rows | error, median | 90 % | first | in 4 | in 8 | trials, median / 90 % "
    "| by rows: first | in 4 | in 8 | trials | bound known | loss at most, median / 90 % |"
)


def device_lines(folder: Path, device: Device, steps: int) -> Iterator[str]:
    """Yield the table of a device, and its fitted rates."""
    rows = read(folder, device)
    tables = sorted({row.table for row in rows})
    yield f"\n## {device.gfx}, {device.cu_num} units\n\n{len(rows)} rows of {len({row.group[1:3] for row in rows})} layers.\n"
    yield f"{HEAD}\n{'|---' * 14}|"
    held = joined([judge(left, device, fit(own, device, steps)) for own, left in folds(rows)])
    lines = {"fitted, layers held out": held}
    for table in tables if len(tables) > 1 else ():
        own, left = ([row for row in rows if (row.table == table) == mine] for mine in (False, True))
        lines[f"fitted, `{table}` held out"] = judge(left, device, fit(own, device, steps))
        lines[f"by clocks, `{table}`"] = before(left, device)
    rates = fit(rows, device, steps)
    lines |= {"fitted, all rows (none held out)": judge(rows, device, rates)}
    if shipped := fitted_cost.RATES.get((device.gfx, device.cu_num)):
        lines |= {"shipped rates (none held out)": judge(rows, device, shipped)}
    lines |= {"by clocks": before(rows, device), "AITER's default": always(rows, DEFAULT)}
    [(common, _)] = Counter(row.winner for row in rows).most_common(1)
    lines[f"always the most frequent, `{common[0].split('_')[3]}`"] = always(rows, common)
    for name, judged in lines.items():
        yield f"| {name} | {len(judged.rank)} | {' | '.join(judged.cells())} |"
    if shipped:
        yield f"\nUntuned calls: {torch_shares(rows, device)} than torch's least."
        yield f"\n{default_line(rows, device, shipped)}"
    fields = ", ".join(f"{value:.4g}" for name, value in attrs.asdict(rates, recurse=False).items() if name != "factors")
    factors = ", ".join(f"{tile}: {factor:.3f}" for tile, factor in rates.factors.items())
    yield f"\nRates: `{fields}`\n\nFactors: `{factors}`"


def main(words: list[str] | None = None) -> int:
    """Write the page, or print it without an output folder."""
    parser = parser_of(__doc__)
    parser.add_argument("--configs", type=Path, required=True, help="AITER's tables")
    parser.add_argument("--steps", type=int, default=3000, help="of a search (default: %(default)s)")
    arguments = parser.parse_args(words)
    lines = ["# CK's block-scaled instances, ordered by AITER's tables", "", "Written by `benchmarks/aiter_fit.py`; figures only.", NOTES]
    lines += [line for device in DEVICES for line in device_lines(arguments.configs, device, arguments.steps)]
    text = "\n".join([*lines, ""])
    if arguments.output is None:
        sys.stdout.write(text)
        return 0
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "README.md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
