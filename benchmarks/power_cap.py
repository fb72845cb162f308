"""What a gain is worth at the power cap: torch's call and the table's take turns in blocks, from one call long to 0.4 s.

    python benchmarks/power_cap.py --table tuned.csv --shapes 32768,4096,4096 8192,4096,4096 --json power.json

In short turns both run at one clock, and the ratio is that of their cycles. In long ones each has the clock that its power leaves it, as
in a model that runs the one or the other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import tunedgemm
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from tunedgemm.dispatch.tuned_gemm import TunedGemm

#: Milliseconds of a block -> rounds; 0 is one call.
ROUNDS = {0: 31, 20: 15, 100: 9, 400: 4}


def us(call: Callable[[], Any], count: int) -> float:
    """Microseconds of a call, *count* of them in a row."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / count


@torch.no_grad()
def measured(gemm: TunedGemm, m: int, n: int, k: int) -> list[dict[str, Any]]:
    """A line for each length of a block."""
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / 64
    calls = {"torch": lambda: torch._C._nn.linear(x, weight), "table": lambda: gemm.gemm_a16w16(x, weight)}
    for call in calls.values():
        call()
    once, lines = us(calls["torch"], 3), []
    for block, rounds in ROUNDS.items():
        count = max(1, int(block * 1e3 / once))
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(rounds):
            for name in list(calls)[:: -1 if number % 2 else 1]:
                taken[name].append(us(calls[name], count))
        gain = statistics.median(before / after for before, after in zip(taken["torch"], taken["table"], strict=True))
        lines.append({"m": m, "n": n, "k": k, "block_ms": block, "calls": count, "us": taken, "gain": gain})
    return lines


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, required=True, help="a tuned CSV of a16w16")
    parser.add_argument("--shapes", nargs="+", required=True, metavar="M,N,K")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there")
    arguments = parser.parse_args()
    gemm = TunedGemm()
    gemm.load_config(arguments.table)
    lines = [line for shape in arguments.shapes for line in measured(gemm, *map(int, shape.split(",")))]
    table = Table(title=f"Gain over F.linear by the length of a turn, {torch.cuda.get_device_name()}", box=SIMPLE_HEAD)
    for column in ("M, N, K", "one call", *(f"{block} ms" for block in ROUNDS if block)):
        table.add_column(column, justify="right", no_wrap=True)
    for first in range(0, len(lines), len(ROUNDS)):
        of_shape = lines[first : first + len(ROUNDS)]
        table.add_row(", ".join(str(of_shape[0][size]) for size in "mnk"), *(f"{line['gain']:.3f}" for line in of_shape))
    Console().print(table)
    if arguments.json:
        told = {"date": datetime.now(timezone.utc).date().isoformat(), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        arguments.json.write_text(json.dumps({**told, "tunedgemm": tunedgemm.__version__, "unit": "us a call", "lines": lines}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
