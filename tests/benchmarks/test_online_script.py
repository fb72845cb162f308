"""benchmarks/online.py: the share of a full tuning's gain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "online.py"


def test_shares_are_of_the_full_gain(as_module: Callable[[Path], ModuleType]) -> None:
    """Half of the saved time is a share of 0.5; without a full table there is none."""
    rows = [{"start_us": 10.0, "after_us": 7.5, "full_us": 5.0}, {"start_us": 2.0, "after_us": 2.0, "full_us": 2.0}]
    shares = as_module(SCRIPT).shares(rows)
    assert shares["share_of_total"] == 0.5 and shares["share_of_mean"] == pytest.approx(0.415, abs=1e-3)
    bare = as_module(SCRIPT).shares([{"start_us": 3.0, "after_us": 2.0}])
    assert bare == {"mean_gain": pytest.approx(1.5), "total_gain": 1.5}
