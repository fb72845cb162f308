"""Host time of the launchers behind a table, of whole calls through dispatch, and of binding a known solution at another M.

    python benchmarks/host_time.py --table tuned.csv --json host.json

A call is timed without waiting for the device, on a queue that is empty at the start and holds no more than 50 calls;
its share of ``torch.empty`` and F.linear stand beside it. Binding is timed at an M that was not bound before, after the
solution's kernel is loaded. Medians in microseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from tunedgemm.backends.launcher import Launcher
from tunedgemm.backends.registry import Registry
from tunedgemm.device import current_device
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.ops import op_named
from tunedgemm.table.csvfile import read_rows
from tunedgemm.table.row import Row

OP = op_named("a16w16")
CALLS, ROUNDS = 50, 21


def host_us(call: Callable[..., Any], *operands: Any) -> float:
    """Median host time of one call."""
    samples = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        for _ in range(CALLS):
            call(*operands)
        samples.append((time.perf_counter_ns() - start) / 1e3 / CALLS)
    torch.cuda.synchronize()
    return statistics.median(samples)


def measured(row: Row, registry: Registry, gemm: TunedGemm) -> dict[str, Any]:
    """Host times of one row's solution, alone and through dispatch."""
    device, backend = current_device(), registry.get(row.solution.libtype)
    launcher = backend.bind(row.solution, row.shape, device)
    operands = OP.make_inputs(row.shape, device.torch_device, 0)
    bindings = []
    for m in range(1, ROUNDS + 1):
        other = attrs.evolve(row.shape, m=row.shape.m if row.shape.m <= 4 else row.shape.m + m)
        start = time.perf_counter_ns()
        if isinstance(backend.bind(row.solution, other, device), Launcher):
            bindings.append((time.perf_counter_ns() - start) / 1e3)
    return {
        "M": row.shape.m, "N": row.shape.n, "K": row.shape.k, "solution": str(row.solution),
        "launch_us": host_us(launcher.call, *operands), "dispatch_us": host_us(gemm.gemm_a16w16, *operands),
        "linear_us": host_us(torch.nn.functional.linear, *operands),
        "empty_us": host_us(lambda: torch.empty((row.shape.m, row.shape.n), dtype=torch.bfloat16, device=device.torch_device)),
        "bind_us": statistics.median(bindings),
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results, gemm = [], TunedGemm()
    gemm.load_config(arguments.table)
    for entry in read_rows(arguments.table, OP)[0]:
        if entry.solution.libtype != "torch" and entry.us < 40:  # longer kernels fill the queue, and the host waits for them
            results.append(measured(entry, Registry(), gemm))
            print({name: round(value, 1) if isinstance(value, float) else value for name, value in results[-1].items()}, flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results))
