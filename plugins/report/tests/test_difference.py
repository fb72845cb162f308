"""Two sides, compared."""

from __future__ import annotations

import attrs
import pytest
from tunedgemm.analysis.results import read_findings, read_sides
from tunedgemm.device import Device
from tunedgemm.solution import Solution
from tunedgemm_report.difference import difference
from tunedgemm_report.document import document

from .conftest import TALL, TRIALS, WIDE, log_lines


def test_two_tables_of_one_op_are_two_sides(table):
    """Compare the second with the first; times within 2 % are equal."""
    first, second = read_sides([table("a.csv"), table("b.csv", scale=0.5)])
    found = difference(first, second)

    assert found.counts == {"slower": 0, "faster": 2, "equal": 0, "new": 0, "gone": 0}
    assert found.gain == pytest.approx((2.0, 2.0))
    assert difference(first, read_findings([table("c.csv", scale=0.985)])).counts["equal"] == 2
    assert difference(second, first).counts["slower"] == 2


def test_noise_makes_no_change(log):
    """Count a change within the noise of both as equal."""
    noisy = {WIDE: [attrs.evolve(timing, us=timing.us * 1.025, noise=0.05) for timing in TRIALS[WIDE][:3]]}
    found = difference(read_findings([log(log_lines({WIDE: TRIALS[WIDE]}))]), read_findings([log(log_lines(noisy), "noisy.jsonl")]))

    assert found.changes[0].ratio == pytest.approx(1 / 1.025)
    assert found.counts["equal"] == 1


def test_new_and_gone(log):
    """Name shapes that only one side has; they have no ratio."""
    first, second = (read_findings([log(log_lines({shape: TRIALS[shape]}), f"{shape.m}.jsonl")]) for shape in (WIDE, TALL))
    found = difference(first, second)

    assert found.counts == {"slower": 0, "faster": 0, "equal": 0, "new": 1, "gone": 1}
    assert found.gain == (0.0, 0.0)
    rows = document(second, against=first)["compare"]["rows"]
    assert {(row["m"], row["verdict"], row["ratio"]) for row in rows} == {(64, "gone", None), (4096, "new", None)}


def test_devices_are_compared_by_shape(table):
    """Compare tables of two devices by shape alone, and say so."""
    other = table("b.csv", scale=2.0, device=Device("gfx942", 304, "amd-instinct-mi300x"))
    first, second = read_sides([table("a.csv"), other])
    made = document(second, against=first)["compare"]

    assert made["across"] and made["counts"]["slower"] == 2
    assert made["first_devices"] == ["sm_90, 132 SMs (nvidia-h200)"]


def test_both_solutions_are_shown(table):
    """Show both winners and times, the largest change first."""
    first, second = read_sides([table("a.csv"), table("b.csv", scale=0.9, m64=Solution("triton", "new"))])
    made = document(second, against=first)

    assert made["title"] == "b.csv against a.csv"
    row = next(row for row in made["compare"]["rows"] if row["m"] == 64)
    assert (row["first_winner"], row["second_winner"]) == ("asm:fast splitK=2", "triton:new")
    assert (row["first_us"], row["second_us"], row["ratio"]) == (8.0, 7.2, pytest.approx(1 / 0.9, rel=1e-4))
