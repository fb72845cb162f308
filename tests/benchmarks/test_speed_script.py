"""benchmarks/speed.py: a table's winners next to torch, and what Inductor compiles, at a tiny size
on the CPU.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tunedgemm.device import device_of
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import write_rows
from tunedgemm.table.row import Row

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_winners_and_compiled_arms_alternate(as_module: Callable[[Path], ModuleType], tmp_path: Path) -> None:
    """Each subject has a sample a round, the arm with our op on offer says what Inductor took, and
    the page has the row.
    """
    shape, device = Shape("a16w16", 5, 48, 64), device_of(-1)
    row = Row(shape=shape, gfx=device.gfx, cu_num=device.cu_num, device=device.name, solution=Solution("torch", "bmm"), us=1.0)
    write_rows(tmp_path / "tuned.csv", op_named("a16w16"), [row])
    words = ["--table", str(tmp_path / "tuned.csv"), "--shapes", "5,48,64", "--rounds", "3", "--arms", "offered", "-o", str(tmp_path)]
    assert as_module(BENCHMARKS / "speed.py").main(words) in (0, 1)  # 1: torch's other route may be slower
    torch._dynamo.reset()

    [result] = json.loads((tmp_path / "speed.json").read_text())["results"]
    assert (result["M"], result["N"], result["K"], result["solution"], result["tuned"]) == (5, 48, 64, "torch:bmm", True)
    assert {name: len(samples) for name, samples in result["samples"].items()} == dict.fromkeys(("default", "again", "tuned", "offered"), 3)
    assert result["low"] <= result["gain"] <= result["high"]
    assert result["took_offered"] in ("our op", "ATen's") and "over_offered" in result
    assert "| 5 | 48 x 64 | `torch:bmm` |" in (tmp_path / "speed.md").read_text()


def test_a_class_is_timed_next_to_the_unconstrained_winner(as_module: Callable[[Path], ModuleType], tmp_path: Path) -> None:
    """The class's row serves in the mode, the other table's outside it, and the cost is the ratio of both."""
    shape, device, op = Shape("a16w16", 5, 48, 64), device_of(-1), op_named("a16w16")
    rows = {"plain": [Row(shape, device.gfx, device.cu_num, device.name, Solution("torch", "native"), us=1.0)], "class": []}
    for m in (5, 0):
        row = Row(shape.with_m(m), device.gfx, device.cu_num, device.name, Solution("torch", "bmm"), us=1.0, bit_class="a" * 16)
        rows["class"].append(row)
    for name, listed in rows.items():
        write_rows(tmp_path / f"{name}.csv", op, listed)
    words = ["--table", str(tmp_path / "class.csv"), "--unconstrained", str(tmp_path / "plain.csv")]
    script = as_module(BENCHMARKS / "speed.py")
    assert script.main([*words, "--shapes", "5,48,64", "--rounds", "3", "-o", str(tmp_path)]) in (0, 1)
    data = json.loads((tmp_path / "speed.json").read_text())
    [result] = data["results"]
    assert (result["solution"], result["unconstrained"], len(result["samples"]["unconstrained"])) == ("torch:bmm", "torch:native", 3)
    cost = f"class over unconstrained {1 / result['over_unconstrained'][0]:.3f}, at most"
    assert all(cost in line for line in data["summary"])
