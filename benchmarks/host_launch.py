"""Host time of the launchers behind a table's rows, for `host_time.py --only launch`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
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

#: Fewer calls than a GPU queues.
QUEUED, QUEUED_ROUNDS, LONG_US = 50, 21, 40


def launches(table: Path) -> Iterator[dict[str, Any]]:
    """Yield the host times of each row's launcher, in microseconds."""
    gemm, registry, op = TunedGemm(), Registry(), op_named("a16w16")
    gemm.load_config(table)
    for row in read_rows(table, op)[0]:
        if row.solution.libtype != "torch" and row.us < LONG_US:  # longer kernels fill the queue, and the host waits for them
            operands = op.make_inputs(row.shape, current_device().torch_device, 0)
            yield launch(row, registry, gemm, operands)


def launch(row: Row, registry: Registry, gemm: TunedGemm, operands: tuple[Any, ...]) -> dict[str, Any]:
    """Return the host times of one row's solution, alone and through dispatch."""
    device, backend = current_device(), registry.get(row.solution.libtype)
    launcher, bindings = backend.bind(row.solution, row.shape, device), []
    for m in range(1, QUEUED_ROUNDS + 1):
        other = attrs.evolve(row.shape, m=row.shape.m if row.shape.m <= 4 else row.shape.m + m)
        start = time.perf_counter_ns()
        if isinstance(backend.bind(row.solution, other, device), Launcher):
            bindings.append((time.perf_counter_ns() - start) / 1e3)
    size = (row.shape.m, row.shape.n)
    return {
        "question": "launch", "M": row.shape.m, "N": row.shape.n, "K": row.shape.k, "solution": str(row.solution),
        "launch_us": queued(launcher.call, *operands), "dispatch_us": queued(gemm.gemm_a16w16, *operands),
        "linear_us": queued(torch.nn.functional.linear, *operands),
        "empty_us": queued(lambda: torch.empty(size, dtype=torch.bfloat16, device=device.torch_device)),
        "bind_us": statistics.median(bindings),
    }  # fmt: skip


def queued(call: Callable[..., Any], *operands: Any) -> float:
    """Return the median host time of one call in microseconds, without waiting for the device."""
    samples = []
    for _ in range(QUEUED_ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        for _ in range(QUEUED):
            call(*operands)
        samples.append((time.perf_counter_ns() - start) / 1e3 / QUEUED)
    torch.cuda.synchronize()
    return statistics.median(samples)
