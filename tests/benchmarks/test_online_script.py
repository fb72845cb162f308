"""benchmarks/online.py: the share of a full tuning's gain, with a toy backend on the CPU."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from tunedgemm.device import device_of
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import write_rows
from tunedgemm.table.row import Row

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "online.py"

#: A backend with one kernel that is torch's.
TOY = """
import sys
from tunedgemm.plugin import Backend, Solution, hookimpl

@hookimpl
def supports():
    return None

@hookimpl
def enumerate_solutions():
    return [Solution("toy", "linear")]

@hookimpl
def run(operands):
    import torch
    return torch.nn.functional.linear(*operands)

backend = Backend("toy", sys.modules[__name__], ops=("a16w16",))
"""


def test_shares_are_of_the_full_gain(as_module: Callable[[Path], ModuleType]) -> None:
    """Half of the saved time is a share of 0.5; without a full table there is none."""
    rows = [{"start_us": 10.0, "after_us": 7.5, "full_us": 5.0}, {"start_us": 2.0, "after_us": 2.0, "full_us": 2.0}]
    shares = as_module(SCRIPT).shares(rows)
    assert shares["share_of_total"] == 0.5 and shares["share_of_mean"] == pytest.approx(0.415, abs=1e-3)
    bare = as_module(SCRIPT).shares([{"start_us": 3.0, "after_us": 2.0}])
    assert bare == {"mean_gain": pytest.approx(1.5), "total_gain": 1.5}


@pytest.mark.nightly
def test_rows_arrive_in_the_loop(
    as_module: Callable[[Path], ModuleType], one_thread: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each shape has its three times, and rows that came while the loop ran."""
    (tmp_path / "toy-1.dist-info").mkdir()
    (tmp_path / "toy-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1\n")
    (tmp_path / "toy-1.dist-info" / "entry_points.txt").write_text("[tunedgemm.backends]\ntoy = toy_backend:backend\n")
    (tmp_path / "toy_backend.py").write_text(TOY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    shape, device = Shape("a16w16", 4, 48, 64), device_of(-1)
    row = Row(shape=shape, gfx=device.gfx, cu_num=device.cu_num, device=device.name, solution=Solution("toy", "linear"), us=1.0)
    write_rows(tmp_path / "full.csv", op_named("a16w16"), [row])
    words = ["--table", str(tmp_path / "full.csv"), "--shapes", "4,48,64", "--rounds", "3", "--libtype", "toy", "-o", str(tmp_path)]

    assert as_module(SCRIPT).main([*words, "--seconds", "25"]) == 0

    data = json.loads((tmp_path / "online.json").read_text())
    [result] = data["rows"]
    assert (result["start"], result["after"], result["full"]) == ("torch:native", "toy:linear", "toy:linear")
    assert result["after_us"] == result["full_us"] > 0 and len(result["samples_start"]) == 3
    assert len(data["serving"]["rows_at"]) == 1 and data["serving"]["passes"] > 1000
