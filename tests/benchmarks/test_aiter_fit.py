"""benchmarks/aiter_fit.py: planted rates found again, folds, and shipped rates on AITER's tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import numpy as np
import pytest
from tunedgemm.backends.rates import read_rates
from tunedgemm.device import Device
from tunedgemm.shape import Shape

fitted_cost = pytest.importorskip("tunedgemm_ck.xdl.fitted_cost")
space = pytest.importorskip("tunedgemm_ck.xdl.space")
cost = pytest.importorskip("tunedgemm_asm.cost")

ROOT = Path(__file__).parents[2]
AITERS = ROOT.parent / "shared" / "aiter"
MI300X = Device("gfx942", 304)
OP = "a8w8_blockscale"


@pytest.fixture(scope="module")
def fitting(as_module: Callable[[Path], ModuleType]) -> ModuleType:
    """Load benchmarks/aiter_fit.py."""
    return as_module(ROOT / "benchmarks" / "aiter_fit.py")


@pytest.fixture(scope="module")
def family(fitting: ModuleType) -> Any:
    """Return the instances of ck that the planted rows are of."""
    return fitting.ck_family(OP, MI300X)


def shipped() -> Any:
    """Return the shipped rates of the planted rows."""
    return fitted_cost.all_rates()["ck", OP, "gfx942", 304]


def planted(fitting: ModuleType) -> list:
    """Return rows whose winners and times follow the shipped rates."""
    rows = []
    for n, k in ((1536, 1024), (7168, 2048), (512, 4096), (4096, 512), (2048, 2048), (3072, 1024)):
        for m in (1, 24, 64, 200, 512, 3000, 8192):
            shape = Shape(OP, m, n, k, "fp8_e4m3fnuz", "bf16", scale="block")
            instance, split = next(iter(space.enumerate_instances(shape, MI300X, True)))
            predicted = fitted_cost.predictor("ck", fitted_cost.described, shape, MI300X)
            assert predicted is not None
            us = predicted(instance, split, shape, MI300X)
            rows.append(fitting.Measured("planted", shape, (instance.name, split), us))
    return rows


def test_the_rates_that_made_the_rows_judge_perfectly(fitting: ModuleType, family: Any) -> None:
    """Arrays and scalars predict alike: the winner is first, its time right, its loss zero."""
    rows = planted(fitting)
    judged = fitting.judge(rows, family, shipped())
    assert judged.error == pytest.approx(0, abs=1e-9)
    assert (judged.rank == 1).all()
    assert (judged.bounds == 0).all()
    assert fitting.judge(rows, family, fitting.BEGIN).error.mean() > 0.05


def test_a_fit_comes_near_the_planted_rates(fitting: ModuleType, family: Any) -> None:
    """A short search lowers the loss of its beginning to less than half."""
    rows = planted(fitting)
    times = fitting.Times.of(rows, family)
    rates = fitting.fit(rows, family, 300)
    assert fitting.loss(rates, times) < 0.5 * fitting.loss(fitting.BEGIN, times)


def test_no_layer_is_both_fitted_and_judged(fitting: ModuleType) -> None:
    """Each row is judged once, by rates that saw no row of its layer."""
    rows, judged = planted(fitting), []
    for own, left in fitting.folds(rows):
        assert not {row.layer for row in own} & {row.layer for row in left}
        judged += left
    assert sorted(judged, key=rows.index) == rows


def test_an_unlisted_winner_and_a_choice_without_rows_are_infinite(fitting: ModuleType) -> None:
    """A constant choice has rank 1 or none, and a bound only where it won with as many rows of x."""
    first, *others = planted(fitting)[:3]
    slower = attrs.evolve(first, shape=attrs.evolve(first.shape, m=5), winner=("other", 0), us=first.us / 2)
    judged = fitting.constant([first, slower, *others], [first.winner] * 4)
    assert judged.rank[:2].tolist() == [1, math.inf]
    assert judged.bounds[0] == 0
    assert fitting.constant([slower, first], [("none", 0)] * 2).bounds.tolist() == [math.inf, math.inf]
    larger = attrs.evolve(first, shape=attrs.evolve(first.shape, m=9))
    assert fitting.constant([slower, larger], [first.winner] * 2).bounds.tolist() == [1.0, 0.0]


def test_rates_are_written_and_read(fitting: ModuleType, family: Any, tmp_path: Path) -> None:
    """A written line is read as the same rates, to three digits; parts without rows are infinite."""
    path = tmp_path / "rates.csv"
    whole = fitting.ck_family(OP, MI300X, split=False)
    for written, added in ((family, shipped().added), (whole, math.inf)):
        path.write_text("\n".join([",".join(fitting.RATES_HEAD), fitting.rates_line(written, shipped(), 1.2), ""]))
        assert read_rates(path) == {("ck", OP, "gfx942", 304): attrs.evolve(shipped(), margin=1.2, added=added)}


@pytest.mark.parametrize(
    ("rows", "error", "gain", "reason"),
    [
        (99, 0.1, 0.3, "fewer than 100 rows"),
        (100, 0.2, 0.3, "error above 15%"),
        (100, 0.1, 0.0, "as good without a model"),
        (100, 0.1, 0.3, ""),
    ],
)
def test_rates_are_used_only_where_they_are_right_and_help(fitting: ModuleType, rows: int, error: float, gain: float, reason: str) -> None:
    """Few rows, a large error, or an order that does not gain leave today's order."""

    def judged(first: float) -> Any:
        rank = np.where(np.arange(rows) < first * rows, 1.0, 2.0)
        return fitting.Judged(np.full(rows, error), rank, np.ones(rows), np.zeros(rows))

    assert fitting.reason_against(judged(0.5 + gain), judged(0.5)) == reason


def test_aiters_rules_name_listed_instances(as_module: Callable[[Path], ModuleType]) -> None:
    """Each rule names one listed instance, but for one that AITER has and the list has not."""
    rules = as_module(ROOT / "benchmarks" / "aiter_rules.py")
    for op, listed in (*rules.DEFAULTS.items(), (OP, rules.PR_3316)):
        names = [instance.name for instance in space.listed_instances(op)]
        for rule in listed:
            named = [name for name in names if f"_{rule.begin}_" in name and name.endswith(rule.end)]
            assert len(named) == (rule.begin != "64x16x16x256")


@pytest.mark.skipif(not AITERS.is_dir(), reason="AITER's tables are not here")
def test_shipped_rates_on_aiters_tables(fitting: ModuleType) -> None:
    """Wherever rates are shipped the median error is at most 15 %, and the first 24 hold 90 % of the
    sampled winners; answers beat torch's least time.
    """
    rows = fitting.measured(AITERS / "configs")
    for family in fitting.families(AITERS / "manifests"):
        rates = {**fitted_cost.all_rates(), **cost.all_rates()}.get((family.libtype, family.op, family.device.gfx, family.device.cu_num))
        if rates is None:
            continue
        mine = fitting.sampled(fitting.rows_of(family, rows))[::4]
        judged = fitting.judge(mine, family, rates)
        assert judged.quantile(0.5) <= 0.15
        assert (judged.rank <= 24).mean() >= 0.9
        tried = mine if family.libtype == "ck" else []
        answered = [row for row in tried if next(iter(space.enumerate_untuned(row.shape, family.device)), None)]
        right = sum(row.us < fitted_cost.torch_least_us(rates, row.shape, family.device) for row in answered)
        assert right >= 0.98 * len(answered) - 1
