"""The subprocess of online tuning: ops in order of value."""

from __future__ import annotations

from pathlib import Path

import pytest
from tunedgemm.device import Device
from tunedgemm.shape import Shape
from tunedgemm.tuner import Options
from tunedgemm.tuner.online import _by_value

H200 = Device("sm_90", 132, "nvidia-h200")
BF16 = Shape("a16w16", 4096, 4096, 4096)
FP8 = Shape("a8w8", 16, 4096, 4096, "fp8", "bf16", scale="row")


@pytest.mark.parametrize(("calls", "first"), [(1, "a8w8"), (1_000_000, "a16w16")])
def test_the_op_with_more_to_save_comes_first_and_gets_more_time(calls: int, first: str, tmp_path: Path) -> None:
    """The saving of a call counts with its calls; the last op gets all of the time that is left."""
    tables = {op: str(tmp_path / f"{op}.csv") for op in ("a16w16", "a8w8")}
    few = Options(budget=10.0)

    order = list(_by_value({BF16: calls, Shape("a16w16", 1, 512, 7168): calls, FP8: 1000}, H200, few, tables))

    assert order[0][0] == first
    assert order[0][1] > 0.5 and order[1][1] == 1.0
    assert list(_by_value({FP8: 1}, H200, few, {"a8w8": tables["a8w8"]})) == [("a8w8", 1.0)]
