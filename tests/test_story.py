"""The sentence, end to end: shape → solutions → timings → table → dispatch. The first test to read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tunedgemm.device import current_device
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.ops import op_named
from tunedgemm.table.csvfile import read_rows
from tunedgemm.testing.fakes import fake_backend, fake_registry
from tunedgemm.tuner import Options, tune


def test_a_captured_shape_is_tuned_stored_and_dispatched_to_its_winner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A workload's shapes are captured, the fastest correct solution wins, and the next call runs it."""
    calls: list[str] = []

    def call(solution, shape, x, weight, bias=None):
        calls.append(solution.kernel_name)
        if solution.kernel_name == "wrong":
            return x.new_zeros(*x.shape[:-1], weight.shape[0])
        return torch.nn.functional.linear(x, weight, bias)

    backend = fake_backend("turbo", solutions=("slow", "wrong", "quick"), call=call, sleep={"slow": 2e-3})
    registry = fake_registry(backend)
    device = current_device().torch_device
    x, weight = torch.randn(3, 256, device=device), torch.randn(64, 256, device=device)

    # shape: the workload runs, capture notes it
    workload = TunedGemm(registry, settings=Settings(capture=True))
    before = workload.gemm_a16w16(x, weight)
    workload.gemm_a16w16(x, weight)
    captured = (tmp_path / "home" / "bf16_untuned_gemm.csv").read_text()
    assert "3,64,256,False,torch.float32,torch.float32,False,False" in captured

    # solutions → timings → table
    report = tune(output=tmp_path / "tuned.csv", options=Options(libtype="turbo", iters=7), registry=registry)
    [outcome] = report.outcomes
    statuses = {timing.solution.kernel_name: timing.status for timing in outcome.timings if timing.solution.libtype == "turbo"}
    assert statuses == {"slow": "ok", "wrong": "wrong", "quick": "ok"}
    [row] = read_rows(tmp_path / "tuned.csv", op_named("a16w16"))[0]
    assert str(row.solution) == "turbo:quick"

    # table → dispatch
    production = TunedGemm(registry)
    production.load_config(tmp_path / "tuned.csv")
    calls.clear()
    after = production.gemm_a16w16(x, weight)
    assert calls == ["quick"]
    torch.testing.assert_close(after, before)
