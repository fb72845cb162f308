"""benchmarks/host_time.py: the host time of calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "host_time.py"


def test_budgets_are_judged_by_differences_and_graphs_by_their_interval(as_module: Callable[[Path], ModuleType]) -> None:
    """A subject is within its budget by its cost over its baseline; a graph if its interval
    includes 1.
    """
    script = as_module(SCRIPT)

    def case(over: float) -> Any:
        samples = {"F.linear": [3000.0, 9000.0], "gemm_a16w16": [3000.0 + over, 9000.0 + over]}
        return script.Case("calls", "cpu", "", samples, dict.fromkeys(samples, "F.linear"), {"F.linear": None, "gemm_a16w16": 1.2})

    assert case(1100).within and not case(1300).within
    assert case(1300).over_us("gemm_a16w16") == 1.3
    graphs = [script.Graph("cuda", "", {"torch": [2.0] * 9, "routed": [2.0 * ratio] * 9}) for ratio in (1.0, 1.02)]
    assert [graph.within for graph in graphs] == [True, False]
