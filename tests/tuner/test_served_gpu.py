"""Served, on a GPU: kernels that are the fastest, right in the timed call, and wrong in use."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from tunedgemm.plugin import Launcher, Solution, hookimpl
from tunedgemm.shape import Shape
from tunedgemm.testing.fakes import fake_backend, fake_registry
from tunedgemm.tuner import Options, tune

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = pytest.mark.gpu

SHAPE = Shape("a16w16", 64, 1024, 1024)
_TILE = 64


@triton.jit
def _product(x, weight, out, calls, rows, n, k, LATE: tl.constexpr, TILE: tl.constexpr):  # noqa: PLR0917
    """Compute out[rows, n] = x[rows, k] @ weight[n, k].T; from call LATE on, one row is zero."""
    row, column = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, k, TILE):
        inner = start + tl.arange(0, TILE)
        left = tl.load(x + row[:, None] * k + inner[None, :], mask=row[:, None] < rows, other=0.0)
        right = tl.load(weight + column[None, :] * k + inner[:, None])
        total = tl.dot(left, right, total)
    if LATE:
        done = tl.atomic_add(calls + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), 1)
        total = tl.where((row[:, None] == 3) & (done >= LATE), 0.0, total)
    tl.store(out + row[:, None] * n + column[None, :], total.to(tl.bfloat16), mask=row[:, None] < rows)


class Kernels:
    """Hooks with one kernel, which is wrong in use, and a slower right one."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.kept: dict[int, torch.Tensor] = {}
        self.count = itertools.count()

    @hookimpl
    def supports(self):
        return None

    @hookimpl
    def enumerate_solutions(self):
        return [Solution("mine", self.fault), Solution("mine", "right")]

    @hookimpl
    def bind(self, solution):
        fault = solution.kernel_name
        calls = torch.zeros(4096, dtype=torch.int32, device="cuda")

        def launch(x, weight):
            rows, k = x.numel() // x.shape[-1], x.shape[-1]
            n = weight.shape[0]
            if fault == "cached weight":
                weight = self.kept.setdefault(weight.data_ptr(), weight.clone())
            if fault == "tail rows":
                rows = max(rows // 8 * 8, 1)
            out = x.new_empty(*x.shape[:-1], n)
            if fault == "ring" and not torch.cuda.is_current_stream_capturing():
                out = self.kept.setdefault(next(self.count) % 32, out).view(-1)[: out.numel()].view(out.shape)
            late = 2000 if fault == "late" else 0
            for _ in range(3 if fault == "right" else 1):
                _product[-(-rows // _TILE), n // _TILE](x, weight, out, calls, rows, n, k, late, _TILE)
            return out

        return Launcher(launch)


@pytest.mark.parametrize("fault", ["ring", "cached weight", "tail rows", "late"])
def test_a_kernel_that_is_wrong_in_use_leaves_the_row_to_the_next(fault: str, tmp_path: Path) -> None:
    """Check that the fastest kernel gets no row if it is wrong in what the row serves."""
    registry = fake_registry(fake_backend("mine", hooks=Kernels(fault)))
    report = tune(shapes=[SHAPE], output=tmp_path / "t.csv", options=Options(libtype="mine"), registry=registry)
    [outcome] = report.outcomes
    timings = {timing.solution.kernel_name: timing for timing in outcome.timings}
    assert outcome.winner is not None and outcome.winner.solution.kernel_name == "right"
    assert timings[fault].status == "wrong", timings[fault]
    print(f"{fault}: {timings[fault].detail}")
