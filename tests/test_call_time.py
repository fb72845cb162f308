"""benchmarks/call_time.py: every way into the tables is measured beside torch's own call."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

#: its verdicts, from samples that are given
VERDICTS = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
from call_time import BUDGETED, Case, Graph
own = {{name: "F.linear" for name in ("F.linear", *BUDGETED)}}
times = lambda over: [3000.0 + over, 9000.0 + over]
case = lambda over: Case("cpu", False, {{"F.linear": times(0), **{{name: times(over) for name in BUDGETED}}}}, own)
print(case(1100).within, case(1300).within, case(1300).over_us("gemm_a16w16"))
graph = lambda ratio: Graph("cuda", False, {{"torch": [2.0] * 9, "routed": [2.0 * ratio] * 9}})
print(graph(1.0).within, graph(1.02).within)
"""


def test_each_way_is_timed(tmp_path) -> None:
    """All subjects have as many samples as rounds, with a bias and without, and each is compared with one that is torch's own."""
    kept = tmp_path / "calls.json"

    subprocess.run([sys.executable, BENCHMARKS / "call_time.py", "--rounds", "3", "--calls", "20", "--json", kept], check=True, timeout=300)

    found = [case for case in json.loads(kept.read_text())["cases"] if case["device"] == "cpu"]
    assert [case["bias"] for case in found] == [False, True]
    linear = {"F.linear", "routed F.linear", "gemm_a16w16", "op of torch.library", "custom_op"}
    linear |= {"nn.Linear", "routed nn.Linear", "converted nn.Linear"}
    products = {f"{routed}torch.mm{other}" for routed in ("", "routed ") for other in ("", " of [K, N]")}
    assert [set(case["samples"]) for case in found] == [linear | products, linear]
    for case in found:
        assert all(len(samples) == 3 and min(samples) > 0 for samples in case["samples"].values())
        assert set(case["own"].values()) <= {"F.linear", "nn.Linear", "torch.mm", "torch.mm of [K, N]"}
        assert all(case["over_us"][own] == 0 for own in case["own"].values())


def test_budgets_are_judged_by_differences_and_graphs_by_their_interval(child) -> None:
    """A way is within its budget by what it costs over torch's call of the same round; a graph where its interval holds 1."""
    assert child(VERDICTS) == "True False 1.3\nTrue False"
