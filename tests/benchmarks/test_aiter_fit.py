"""benchmarks/aiter_fit.py: planted rates found again, folds, and shipped rates on AITER's tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import attrs
import numpy as np
import pytest
from tunedgemm.device import Device
from tunedgemm.shape import Shape

pytest.importorskip("tunedgemm_ck")

ROOT = Path(__file__).parents[2]
AITERS = ROOT.parent / "shared" / "aiter" / "configs"
MI300X = Device("gfx942", 304)


@pytest.fixture(scope="module")
def fitting(as_module: Callable[[Path], ModuleType]) -> ModuleType:
    """Load benchmarks/aiter_fit.py."""
    return as_module(ROOT / "benchmarks" / "aiter_fit.py")


def planted(fitting: ModuleType) -> list:
    """Return rows whose winners and times follow the shipped rates."""
    rows = []
    for n, k in ((1536, 1024), (7168, 2048), (512, 4096), (4096, 512), (2048, 2048), (3072, 1024)):
        for m in (1, 24, 64, 200, 512, 3000, 8192):
            shape = Shape("a8w8_blockscale", m, n, k, "fp8_e4m3fnuz", "bf16", scale="block")
            instance, split = fitting.space.enumerate_instances(shape, MI300X, True)[0]
            us = fitting.fitted_cost.cost_of(instance, split, shape, MI300X)
            rows.append(fitting.Measured("planted", shape, (instance.name, split), us))
    return rows


def test_the_rates_that_made_the_rows_judge_perfectly(fitting: ModuleType) -> None:
    """Arrays and scalars predict alike: the winner is first, its time right, its loss zero."""
    rows = planted(fitting)
    judged = fitting.judge(rows, MI300X, fitting.fitted_cost.RATES["gfx942", 304])
    assert judged.error == pytest.approx(0, abs=1e-9)
    assert (judged.rank == 1).all()
    assert (judged.bounds == 0).all()
    assert fitting.judge(rows, MI300X, fitting.BEGIN).error.mean() > 0.05


def test_a_fit_comes_near_the_planted_rates(fitting: ModuleType) -> None:
    """A short search lowers the loss of its beginning to less than half."""
    rows = planted(fitting)
    times = fitting.Times.of(rows, MI300X)
    rates = fitting.fit(rows, MI300X, 300)
    assert fitting.loss(rates, times) < 0.5 * fitting.loss(fitting.BEGIN, times)


def test_no_layer_is_both_fitted_and_judged(fitting: ModuleType) -> None:
    """Each row is judged once, by rates that saw no row of its layer."""
    rows, judged = planted(fitting), []
    for own, left in fitting.folds(rows):
        assert not {row.group[1:3] for row in own} & {row.group[1:3] for row in left}
        judged += left
    assert sorted(judged, key=rows.index) == rows


def test_an_unlisted_winner_and_a_choice_without_rows_are_infinite(fitting: ModuleType) -> None:
    """A constant choice has rank 1 or none, and a bound only where it won with as many rows of x."""
    first, *others = planted(fitting)[:3]
    slower = attrs.evolve(first, shape=attrs.evolve(first.shape, m=5), winner=("other", 0), us=first.us / 2)
    judged = fitting.always([first, slower, *others], first.winner)
    assert judged.rank[:2].tolist() == [1, math.inf]
    assert judged.bounds[0] == 0
    assert fitting.always([slower, first], ("none", 0)).bounds.tolist() == [math.inf, math.inf]
    larger = attrs.evolve(first, shape=attrs.evolve(first.shape, m=9))
    assert fitting.always([slower, larger], first.winner).bounds.tolist() == [1.0, 0.0]


@pytest.mark.skipif(not AITERS.is_dir(), reason="AITER's tables are not here")
@pytest.mark.parametrize(("number", "first", "eight"), [(0, 0.5, 0.95), (1, 0.55, 0.85)])
def test_shipped_rates_on_aiters_tables(fitting: ModuleType, number: int, first: float, eight: float) -> None:
    """The median error is at most 8 %, winners are early, and answers beat torch's least time."""
    device = fitting.DEVICES[number]
    rows = fitting._sampled(fitting.read(AITERS, device))
    judged = fitting.judge(rows, device, fitting.fitted_cost.RATES[device.gfx, device.cu_num])
    assert np.median(judged.error) <= 0.08
    assert np.average(judged.rank == 1, weights=judged.weight) >= first
    assert np.average(judged.rank <= 8, weights=judged.weight) >= eight
    answered = [row for row in rows if next(fitting.space.enumerate_untuned(row.shape, device), None)]
    assert len(answered) > 50
    assert all(row.us < fitting.fitted_cost.torch_least_us(row.shape, device) for row in answered)
