"""Figures of one shape: winner, gain, floor, ties."""

from __future__ import annotations

import math

import attrs
import pytest
from tunedgemm.analysis.results.entry import BASELINE, Entry, Trial, Winner, gain_of
from tunedgemm.device import Device
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.tuner.roofline import floor_us

H200 = Device("sm_90", 132, "nvidia-h200")
SHAPE = Shape("a16w16", 64, 2048, 4096)


def entry(**trials: Trial) -> Entry:
    """Return an entry with torch at 12 us and further trials, by kernel name of `asm`."""
    named = {BASELINE: Trial("torch", "ok", 12.0, 0.002, 51, "")} | {f"asm:{name}": trial for name, trial in trials.items()}
    return Entry(H200, op_named("a16w16"), SHAPE, trials=named)


FAST = Trial("asm", "ok", 8.0, 0.001, 51, "")


def test_the_fastest_correct_trial_wins_without_table_and_outcome():
    """Take the fastest trial that passed; a wrong one and a rough timing cannot win."""
    found = entry(fast=FAST, wrong=FAST._replace(status="wrong", us=1.0), rough=FAST._replace(status="screened", us=2.0))

    assert found.winner == Winner("asm:fast", "asm", 8.0, 0.001)
    assert found.gain == pytest.approx(1.5)


def test_a_row_wins_over_the_log():
    """Take the table's row, its noise from its trial, and the faster of two rows."""
    found = entry(fast=FAST, other=FAST._replace(us=9.0, noise=0.01))
    found.outcome, found.ended = Winner("asm:fast", "asm", 8.0), True
    found.put_row(Winner("asm:other", "asm", 9.0))
    found.put_row(Winner("asm:slow", "asm", 11.0))

    assert found.winner == Winner("asm:other", "asm", 9.0, 0.01)
    assert found.gain == pytest.approx(12 / 9)


def test_a_shape_without_a_solution_has_no_gain():
    """Respect an outcome that no solution passed, whatever was timed before."""
    found = entry(fast=FAST)
    found.ended = True

    assert found.winner is None
    assert (found.gain, found.ties) == (0.0, 0)


def test_no_gain_is_guessed_without_torchs_time():
    """Leave the gain unknown where torch was not timed, also where the row is torch's own call."""
    found = Entry(H200, op_named("a16w16"), SHAPE, row=Winner(BASELINE, "torch", 12.0))

    assert (found.torch_us, found.gain) == (0.0, 0.0)
    assert gain_of([found]) is None


def test_torchs_own_call_gains_nothing():
    """Return exactly 1 where torch wins, even if the table's time is of another session."""
    found = entry()
    found.put_row(Winner(BASELINE, "torch", 11.0))

    assert found.gain == 1.0


def test_ties_follow_the_tuners_rule():
    """Count solutions within the tuner's margin, unless the log counted them."""
    found = entry(fast=FAST, near=FAST._replace(us=8.03), far=FAST._replace(us=8.2), rough=FAST._replace(status="screened", us=8.01))

    assert found.ties == 1
    found.tied = 7
    assert found.ties == 7


def test_the_floor_is_the_tuners():
    """Use the tuner's ceilings, and none for a device without them."""
    found = entry(fast=FAST)

    assert found.floor_us == floor_us(op_named("a16w16"), SHAPE, H200) > 0
    assert attrs.evolve(found, device=Device("sm_90", 132, "nvidia-h100")).floor_us == 0.0


def test_gains_weigh_by_calls():
    """Weigh the geometric mean by calls, and the whole by calls and time."""
    fast, even = entry(fast=FAST), entry()
    assert gain_of([fast, even]).mean == pytest.approx(math.sqrt(1.5))

    fast.calls = 3
    total = gain_of([fast, even])
    assert total.mean == pytest.approx(1.5**0.75)
    assert total.time == pytest.approx((3 * 12 + 12) / (3 * 8 + 12))
