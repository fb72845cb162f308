"""Fit the rates that order kernels of AMD GPUs to AITER's tables, and judge them.

    python benchmarks/aiter_fit.py --configs AITER/aiter/configs --manifests DIR [--steps 1000]
        [--rates FILE] [-o FOLDER]

A table holds the fastest kernel of each shape and its time. The fit lowers the errors of these
times, the predicted losses of the winners, and their ranks. Each layer (N, K) has the same weight
in each band of M, because tables have thousands of rows of few layers. A layer's rows are predicted
by rates that were fitted without it, or, between tables, without its whole table.

A table has no times of slower kernels. So a choice's loss is known only as a bound: the time of a
row of the same layer, with at least as many rows of x, whose winner is that choice.
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
from aiter_repeats import ladder_lines, repeats
from aiter_rows import Candidate, Choice, Family, Measured, ck_family, families, measured, rows_of
from aiter_rules import DEFAULTS, PR_3316, Rule, choice_of
from harness import parser_of, write_page
from tunedgemm.backends.rates import Rates, Work, predict_us
from tunedgemm_asm import cost as asm_cost
from tunedgemm_ck.xdl import fitted_cost, space
from tunedgemm_ck.xdl.names import FORMS

#: Rows of a layer and a band of M that are fitted at most; folds of layers.
MOST, FOLDS = 8, 5
#: Where the search begins; fractions are clipped to 0 and 1, all else changes by factors.
BEGIN = Rates(1.5, 1, 0.3, 1.7, 1.4e-5, 4e6, 6e4, 2e4, 5e6, 3e6, 3e5, 0.15, 0.3, 0.2, {})
#: Names of rates, without factors and margin.
NAMES = tuple(each.name for each in attrs.fields(Rates))[:-2]
FRACTIONS = ("serial", "overlap", "whole")
NOTES = """
No kernel ran here: AITER's authors measured the times, on GPUs that we do not have.

- error: of the predicted time of the row's winner, median and 90 %, each layer (N, K) with one vote
  in each band of M (to 16, 64, 256, 1024, 4096, more). The same votes count in the next columns.
- first, in 4, 8, 24: how often the row's winner is that near to the list's beginning.
- trials: up to the winner, median and 90 %; inf if it is not listed. By rows: each row has a vote.
- without a model: the order of ops and devices without rates. AITER's choice: for shapes without a row;
  of asm it is the first of the order without a model, which follows AITER's launchers.
- loss at most: the time of a row of the layer with at least as many rows of x that the first choice
  won, over the row's. bound known: for how many rows there is one.
- A table's winners are of all its libtypes. A family's list is judged on the rows that it won.
"""
#: Families without rates, and why.
NO_MODEL = """\
Without a model, today's order stays:

- hipblaslt has no row. triton has one name, `auto`, in all rows, skinny one kernel in 2 rows, torch none.
- flydsl and opus are not lists of ours; of flydsl most kernels won a few rows each.
- batched ops, `a8w8` on gfx942 and other families of fewer than 100 rows or 5 layers.
- fmoe: a row is the sum of two kernels, and its time depends on routing, which tables do not state.
"""
UNTUNED = """\
By the shipped rates, on the rows whose shape AITER's choice takes: predicted times over the row's, median / 90 %.
Answered: of all rows. Below torch's least: the row's time, of those answered. Shares of calls are in [untuned.md](untuned.md).
"""
OTHERS = """\
There the row's time is at most that of any kernel of the family, which the fit did not see. A prediction below
it is wrong. By the shipped rates, families of at least 100 such rows.
"""
PADDED = """\
A row of the padded M serves a smaller M, which has a row, too. With the same kernel nothing is lost.
Else the padded row's time over the row's is a bound. Finely and coarsely: AITER's two steps.
"""
#: Conditions of use: rows, median error, and points of winners that are first.
LEAST_ROWS, MOST_ERROR, LEAST_GAIN = 100, 0.15, 0.05
#: Weight of a winner's rank in the loss, and of the squared logarithms of factors.
OF_RANK, OF_FACTORS = 0.02, 0.03


@attrs.frozen(eq=False)
class Times:
    """Rows as arrays: rows down, candidates across; *fits* says which candidates are listed."""

    work: Work
    candidates: list[Candidate]
    fits: Any
    winner: Any
    us: Any
    weight: Any

    @classmethod
    def of(cls, rows: list[Measured], family: Family) -> Times:
        """Return the arrays of some rows."""
        listed = [set(family.fitting(row.shape)) for row in rows]
        tried = {row.winner for row in rows}.union(*listed)
        candidates = [each for each in family.candidates if each.choice in tried]
        tiles = np.array([each.sides for each in candidates], float).T
        parts, resident = (np.array([getattr(each, name) for each in candidates], float) for name in ("parts", "resident"))
        m, n, k = np.array([(row.shape.m, row.shape.n, row.shape.k) for row in rows], float).T[:, :, None]
        work = Work(m, n, k, *tiles, parts, float(family.device.cu_num), resident, 1.0)
        fits = np.array([[each.choice in choices for each in candidates] for choices in listed])
        column = {each.choice: number for number, each in enumerate(candidates)}
        counts = Counter(row.group for row in rows)
        weight = np.array([1 / counts[row.group] for row in rows])
        return cls(work, candidates, fits, np.array([column[row.winner] for row in rows]), np.array([row.us for row in rows]), weight)

    def predict(self, rates: Rates) -> tuple[Any, Any]:
        """Return the predicted times of all candidates, and of the winners; infinite if not listed."""
        factors = np.array([rates.factors.get(each.key, 1.0) for each in self.candidates])
        us = np.where(self.fits, predict_us(rates, attrs.evolve(self.work, factor=factors)), np.inf)
        return us, us[np.arange(len(us)), self.winner]


def loss(rates: Rates, times: Times) -> float:
    """Return the loss of some rates; 0 is perfect."""
    us, won = times.predict(rates)
    known = np.isfinite(won)
    error = np.minimum(abs(np.log(won[known] / times.us[known])), 1)
    gap = np.minimum(np.log(won[known] / us[known].min(1)), 0.5)
    rank = np.minimum((us[known] < won[known][:, None] * 0.999).sum(1), 8)
    factors = sum(math.log(factor) ** 2 for factor in rates.factors.values())
    return float(np.average(error + gap + OF_RANK * rank, weights=times.weight[known])) + OF_FACTORS * factors


def fit(rows: list[Measured], family: Family, steps: int, seed: int = 0) -> Rates:
    """Return the best rates of a random search."""
    chance, times = np.random.default_rng(seed), Times.of(sampled(rows), family)
    rates = attrs.evolve(BEGIN, factors=dict.fromkeys((each.key for each in times.candidates), 1.0))
    least = loss(rates, times)
    names = [*NAMES, *rates.factors]
    for step in range(steps):
        trial, reach = rates, 0.35 * (1 - 0.9 * step / steps)
        for number in chance.choice(len(names), chance.integers(1, 3), replace=False):
            trial = _changed(trial, names[number], float(chance.normal(0, reach)))
        if (now := loss(trial, times)) < least:
            rates, least = trial, now
    return rates


def _changed(rates: Rates, name: Any, step: float) -> Rates:
    if not isinstance(name, str):
        return attrs.evolve(rates, factors={**rates.factors, name: rates.factors[name] * math.exp(step)})
    before = getattr(rates, name)
    after = min(max(before + step / 2, 0.0), 1.0) if name in FRACTIONS else before * math.exp(step)
    return attrs.evolve(rates, **{name: after})


def sampled(rows: list[Measured]) -> list[Measured]:
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
        known = np.isfinite(self.error).any()
        both = " / ".join(f"{self.quantile(of):.1%}" for of in (0.5, 0.9)) if known else ""
        cells = [both]
        for weight in (self.weight, np.ones(len(self.rank))):
            cells += [f"{np.average(self.rank <= most, weights=weight):.1%}" for most in (1, 4, 8, 24)]
            cells.append(" / ".join(f"{_quantile(self.rank, weight, of):.0f}" for of in (0.5, 0.9)))
        known = np.isfinite(self.bounds)
        bound = f"{np.median(self.bounds[known]):.1%} / {np.quantile(self.bounds[known], 0.9):.1%}" if known.any() else ""
        return [*cells, f"{known.mean():.0%}", bound]

    def quantile(self, share: float) -> float:
        """Return the error that a share of predictions does not exceed."""
        known = np.isfinite(self.error)
        return _quantile(self.error[known], self.weight[known], share)

    def first(self) -> float:
        """Return the share of layers and bands whose winner is first."""
        return float(np.average(self.rank == 1, weights=self.weight))


RATES_HEAD = ("libtype", "op", "gfx", "units", "margin", *NAMES, "factors")


def rates_line(family: Family, rates: Rates, margin: float) -> str:
    """Return a line of the file of rates."""
    if all(each.parts == 1 for each in family.candidates):
        rates = attrs.evolve(rates, added=math.inf)
    values = [f"{value:.3g}" for value in (getattr(rates, name) for name in NAMES)]
    factors = " ".join(f"{'x'.join(map(str, key))}={factor:.2f}" for key, factor in rates.factors.items())
    return ",".join([family.libtype, family.op, family.device.gfx, str(family.device.cu_num), f"{margin:.2f}", *values, factors])


def _quantile(values: Any, weights: Any, share: float) -> float:
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(total, share * total[-1])])


def judge(rows: list[Measured], family: Family, rates: Rates) -> Judged:
    """Judge rates by some rows."""
    times = Times.of(rows, family)
    us, won = times.predict(rates)
    first = [times.candidates[number].choice for number in us.argmin(1)]
    rank = np.where(np.isfinite(won), 1 + (us < won[:, None]).sum(1), np.inf)
    return Judged(abs(won / times.us - 1), rank, times.weight, _bounds(rows, first))


def _bounds(rows: list[Measured], first: list[Choice]) -> Any:
    """Return bounds of what first choices lose, infinite where no row has one."""
    by_layer = defaultdict[Any, list[tuple[int, float]]](list)
    for row in rows:
        by_layer[row.table, row.shape.n, row.shape.k, row.winner].append((row.shape.m, row.us))
    bounds = []
    for row, choice in zip(rows, first, strict=True):
        larger = [us for m, us in by_layer[row.table, row.shape.n, row.shape.k, choice] if m >= row.shape.m]
        bounds.append(max(min(larger, default=math.inf) / row.us - 1, 0.0))
    return np.array(bounds)


def fixed(rows: list[Measured], ranks: list[float], first: list[Choice]) -> Judged:
    """Judge an order without times."""
    counts = Counter(row.group for row in rows)
    weight = np.array([1 / counts[row.group] for row in rows])
    return Judged(np.full(len(rows), np.inf), np.array(ranks, float), weight, _bounds(rows, first))


def joined(parts: list[Judged]) -> Judged:
    """Return the predictions of several folds as one."""
    return Judged(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("error", "rank", "weight", "bounds")))


def folds(rows: list[Measured]) -> Iterator[tuple[list[Measured], list[Measured]]]:
    """Yield rows to fit and rows to judge: the latter's layers are not among the former's."""
    layers = sorted({row.layer for row in rows})
    count = min(FOLDS, len(layers))
    order = np.random.default_rng(0).permutation(len(layers))
    fold: Mapping[Any, int] = {layers[number]: place % count for place, number in enumerate(order)}
    for own in range(count):
        yield [row for row in rows if fold[row.layer] != own], [row for row in rows if fold[row.layer] == own]


def before(rows: list[Measured], family: Family) -> Judged:
    """Judge the order without a model."""
    ranks, first = [], []
    for row in rows:
        listed = list(family.before(row.shape))
        ranks.append(listed.index(row.winner) + 1 if row.winner in listed else math.inf)
        first.append(listed[0] if listed else ("", 0))
    return fixed(rows, ranks, first)


def constant(rows: list[Measured], choices: list[Choice]) -> Judged:
    """Judge one choice for each shape."""
    return fixed(rows, [1 if row.winner == choice else math.inf for row, choice in zip(rows, choices, strict=True)], choices)


def by_rules(rows: list[Measured], family: Family, rules: tuple[Rule, ...]) -> Judged:
    """Judge AITER's rules."""
    names = list(dict.fromkeys(each.choice[0] for each in family.candidates))
    return constant(rows, [choice_of(rules, names, FORMS[family.op].prefix, row.shape) for row in rows])


HEAD = (
    "| family | order | rows | error | first | in 4 | in 8 | in 24 | trials "
    "| by rows: first | in 4 | in 8 | in 24 | trials | bound known | loss at most |"
)


def judged_orders(family: Family, rows: list[Measured], steps: int) -> dict[str, Judged]:
    """Return the judged orders of a family by name."""
    lines = {"fitted, layers held out": joined([judge(left, family, fit(own, family, steps)) for own, left in folds(rows)])}
    tables = sorted({row.table for row in rows})
    for table in tables if len(tables) > 1 and family.op == "a8w8_blockscale" and family.libtype == "ck" else ():
        own, left = ([row for row in rows if (row.table == table) == mine] for mine in (False, True))
        lines[f"fitted, `{table}` held out"] = judge(left, family, fit(own, family, steps))
    lines["without a model"] = before(rows, family)
    if family.libtype == "ck" and family.op in DEFAULTS:
        lines["AITER's choice"] = by_rules(rows, family, DEFAULTS[family.op])
    if (family.libtype, family.op, family.device.gfx) == ("ck", "a8w8_blockscale", "gfx942"):
        lines["AITER's pull request 3316"] = by_rules(rows, family, PR_3316)
        whole = ck_family(family.op, family.device, split=False)
        mine = [row for row in rows if not row.winner[1]]
        lines["pull request 3316, winners without splits"] = by_rules(mine, whole, PR_3316)
        lines["fitted to these, layers held out"] = joined([judge(left, whole, fit(own, whole, steps)) for own, left in folds(mine)])
    return lines


def untuned_line(family: Family, rows: list[Measured], rates: Rates) -> str:
    """Return a line about untuned calls: AITER's choice and ours by the prediction, and torch."""
    times, names = Times.of(rows, family), list(dict.fromkeys(each.choice[0] for each in family.candidates))
    us, _ = times.predict(rates)
    column = {each.choice: number for number, each in enumerate(times.candidates)}
    theirs = [column.get(choice_of(DEFAULTS.get(family.op, ()), names, FORMS[family.op].prefix, row.shape)) for row in rows]
    known = np.array([number is not None and np.isfinite(line[number]) for number, line in zip(theirs, us, strict=True)])
    whole = us[:, [number for number, each in enumerate(times.candidates) if each.parts == 1]].min(1)
    taken = np.array([line[number] if fits else np.inf for line, number, fits in zip(us, theirs, known, strict=True)])
    cells = []
    for predicted in (taken, whole):
        ratio, weight = predicted[known] / times.us[known], times.weight[known]
        cells.append(" / ".join(f"{_quantile(ratio, weight, of):.2f}" for of in (0.5, 0.9)) if known.any() else "")
    answered = [row for row in rows if next(iter(space.enumerate_untuned(row.shape, family.device)), None)]
    right = sum(row.us < fitted_cost.torch_least_us(rates, row.shape, family.device) for row in answered)
    share = f"{right / len(answered):.1%}" if answered else ""
    return f"| {family.name} | {known.sum()} | {' | '.join(cells)} | {len(answered) / len(rows):.0%} | {share} |"


def untuned_lines(rows: Mapping[Any, list[Measured]], own: list[Family]) -> Iterator[str]:
    """Yield the table of untuned calls by the shipped rates of ck."""
    yield "| family | rows | AITER's choice | first choice without splits | answered | below torch's least |"
    yield "|---" * 6 + "|"
    for family in own:
        rates = shipped_rates(family)
        if family.libtype == "ck" and rates:
            yield untuned_line(family, rows_of(family, rows), rates)


def shipped_rates(family: Family) -> Rates | None:
    """Return a family's rates in the plugins."""
    key = family.libtype, family.op, family.device.gfx, family.device.cu_num
    return fitted_cost.all_rates().get(key) or asm_cost.all_rates().get(key)


def other_lines(rows: Mapping[Any, list[Measured]], own: list[Family]) -> Iterator[str]:
    """Yield the table of rows that another libtype won, where no kernel of a family is faster."""
    yield "| family | rows of | rows | first prediction over the row's time, 10 % / median | below by more than the margin |"
    yield "|---" * 5 + "|"
    for family in own:
        rates = shipped_rates(family)
        for (op, libtype, gfx, units), mine in sorted(rows.items()):
            if rates is None or (op, gfx, units) != (family.op, family.device.gfx, family.device.cu_num) or libtype == family.libtype:
                continue
            tried = [attrs.evolve(row, winner=next(iter(family.fitting(row.shape)))) for row in mine if family.fitting(row.shape)]
            if len(tried) < LEAST_ROWS:
                continue
            ratio = np.concatenate([Times.of(tried[at : at + 500], family).predict(rates)[0].min(1) for at in range(0, len(tried), 500)])
            ratio /= np.array([row.us for row in tried])
            least, median = np.quantile(ratio, (0.1, 0.5))
            yield f"| {family.name} | {libtype} | {len(ratio)} | {least:.2f} / {median:.2f} | {(ratio < 1 / rates.margin).mean():.0%} |"


def survey_lines(rows: Mapping[Any, list[Measured]], own: list[Family]) -> Iterator[str]:
    """Yield the table of all rows by op, libtype and device."""
    yield "| op | libtype | device | rows | layers | tables | kernels | with splits | most frequent | candidates of ours |"
    yield "|---" * 10 + "|"
    listed = {(each.op, each.libtype, each.device.gfx, each.device.cu_num): len(each.candidates) for each in own}
    for (op, libtype, gfx, units), mine in sorted(rows.items()):
        winners, tables = Counter(row.winner for row in mine), {row.table for row in mine}
        kernels, layers = {name for name, _ in winners}, {row.layer for row in mine}
        [(_, most)] = winners.most_common(1)
        cells = (len(mine), len(layers), len(tables), len(kernels), len(winners), f"{most / len(mine):.0%}")
        count = listed.get((op, libtype, gfx, units), "")
        yield f"| `{op}` | {libtype} | {gfx}:{units} | {' | '.join(map(str, cells))} | {count} |"


def reason_against(held: Judged, without: Judged) -> str:
    """Return why a family's rates are not used, or ""."""
    error = held.quantile(0.5)
    if len(held.rank) < LEAST_ROWS:
        return f"fewer than {LEAST_ROWS} rows"
    if error > MOST_ERROR:
        return f"error above {MOST_ERROR:.0%}"
    return "" if held.first() >= without.first() + LEAST_GAIN else "as good without a model"


def page(configs: Path, manifests: Path, steps: int, rates: Path | None) -> Iterator[str]:
    """Yield the lines of the page; write the rates that are used."""
    rows, own = measured(configs), families(manifests)
    yield from ("# Kernels of AMD, ordered by AITER's tables", "", "Written by `benchmarks/aiter_fit.py`; figures only.", NOTES)
    yield from ("## Rows", "", *survey_lines(rows, own), "", NO_MODEL, "## Orders", "", HEAD, "|---" * 16 + "|")
    lines, against = [], ["| family | rates |", "|---|---|"]
    for family in own:
        mine = rows_of(family, rows)
        orders = judged_orders(family, mine, steps)
        for name, judged in orders.items():
            yield f"| {family.name} | {name} | {len(judged.rank)} | {' | '.join(judged.cells())} |"
        held = orders["fitted, layers held out"]
        reason = reason_against(held, orders["without a model"])
        against.append(f"| {family.name} | {reason or 'used, margin ' + format(1 + held.quantile(0.9), '.2f')} |")
        if rates is not None and not reason:
            lines.append(rates_line(family, fit(mine, family, steps), 1 + held.quantile(0.9)))
    yield from ("\n## Rates in use\n", *against)
    yield from ("\n## Untuned calls\n", UNTUNED, *untuned_lines(rows, own))
    yield from ("\n## Rows that another libtype won\n", OTHERS, *other_lines(rows, own))
    yield from ("\n## The same shape in two tables\n", repeats(rows))
    yield from ("\n## Rows of a padded M\n", PADDED, *ladder_lines(rows))
    for name in () if rates is None else ("ck", "asm"):
        kept = [line for line in lines if line.startswith(name)]
        (rates / f"{name}.csv").write_text("\n".join([",".join(RATES_HEAD), *kept, ""]))


def main(words: list[str] | None = None) -> int:
    """Write the page, or print it without an output folder."""
    parser = parser_of(__doc__)
    parser.add_argument("--configs", type=Path, required=True, help="AITER's tables")
    parser.add_argument("--manifests", type=Path, required=True, help="AITER's manifests")
    parser.add_argument("--steps", type=int, default=1000, help="of a search (default: %(default)s)")
    parser.add_argument("--rates", type=Path, help="write the fitted rates to files in this folder")
    arguments = parser.parse_args(words)
    text = "\n".join([*page(arguments.configs, arguments.manifests, arguments.steps, arguments.rates), ""])
    write_page(arguments.output, "README.md", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
