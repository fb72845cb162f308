"""benchmarks/drawn.py: products drawn by chance, the same for each seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from tunedgemm.ops import op_named
from tunedgemm.table.untuned import read_untuned

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "drawn.py"


@pytest.mark.parametrize("op", ["a16w16", "a8w8", "a8w8_blockscale"])
def test_parts_share_products_of_every_m(as_module: Callable[[Path], ModuleType], tmp_path: Path, op: str) -> None:
    """The parts hold each product once, every M equally often, and no weight that has rows."""
    script = as_module(SCRIPT)
    script.main(["--op", op, "--models", "60", "--random", "30", "--parts", "4", "-o", str(tmp_path)])
    lists = [[row.shape for row in read_untuned(tmp_path / f"{op}-{part}.csv", op_named(op))] for part in range(4)]
    shapes = [shape for each in lists for shape in each]
    assert {len(each) for each in lists} == {22, 23} and len(set(shapes)) == 90
    assert Counter(shape.m for shape in shapes) == dict.fromkeys(script.MS, 6)
    assert set(shapes) == set(script.drawn(op, 60, 30, 0)) != set(script.drawn(op, 60, 30, 1))
    known = script.with_rows(op)
    assert known and not known & {(shape.n, shape.k) for shape in shapes}
