"""benchmarks/host_time.py: the host time of calls."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "host_time.py"


def test_every_question_keeps_every_sample(tmp_path: Path) -> None:
    """Dispatch, capture and each way into the tables are timed on the CPU, each next to its
    baseline.
    """
    command = [sys.executable, SCRIPT, "--rounds", "3", "--calls", "20", "-o", tmp_path]
    subprocess.run(command, check=True, capture_output=True, timeout=300)

    data = json.loads((tmp_path / "host_time.json").read_text())
    rows = [row for row in data["rows"] if row["device"] == "cpu"]
    calls: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        calls.setdefault((row["question"], row["call"]), set()).add(row["subject"])
    ways = {"F.linear", "routed F.linear", "gemm_a16w16", "op of torch.library", "custom_op"}
    ways |= {"nn.Linear", "routed nn.Linear", "converted nn.Linear"}
    products = {f"{routed}torch.mm{other}" for routed in ("", "routed ") for other in ("", " of [K, N]")}
    entries, both = {"launcher", "gemm_a16w16", "tgemm.mm", "F.linear"}, {"without capture", "with capture"}
    dispatch = {("dispatch", f"{dimensions}-D{bias}"): entries for dimensions in (2, 3) for bias in ("", ", bias")}
    capture = {("capture", f"eager{bias}"): both for bias in ("", ", bias")}
    assert calls == {**dispatch, **capture, ("calls", ""): ways | products, ("calls", "bias"): ways}
    assert all(len(row["samples_ns"]) == 3 and min(row["samples_ns"]) > 0 for row in rows)
    assert all(row["over_us"] == 0 for row in rows if row["subject"] == row["baseline"])
    assert {"date", "device", "versions", "command"} <= data.keys()
    assert "| dispatch | cpu | 2-D | gemm_a16w16 |" in (tmp_path / "host_time.md").read_text()


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
