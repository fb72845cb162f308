"""Test which untuned calls get a kernel without a JSON file, and its measured gain."""

from __future__ import annotations

import csv
import gzip
import statistics
from pathlib import Path
from typing import Any

import attrs
import pytest
import tunedgemm_triton
from tunedgemm.plugin import Device, Shape

H200 = Device("sm_90", 132, "nvidia-h200")
TRIALS = Path(__file__).parents[3] / "benchmarks/results/h100-2026-11-26/a16w16-cold-trials.csv.gz"
ONE_ROW = Shape("a16w16", 1, 6144, 4096)


@pytest.fixture(autouse=True)
def without_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide the JSON files of the user."""
    monkeypatch.setenv("TUNEDGEMM_HOME", str(tmp_path))


def test_the_kernel_of_one_row_was_faster_than_torchs() -> None:
    """The kernel of an untuned row was over 1.02 times as fast as torch's call in 30 products."""
    times: dict[Shape, dict[tuple[str, str, int], float]] = {}
    with gzip.open(TRIALS, "rt", newline="") as text:
        for row in csv.DictReader(text):
            shape = attrs.evolve(ONE_ROW, m=int(row["M"]), n=int(row["N"]), k=int(row["K"]))
            times.setdefault(shape, {})[row["libtype"], row["kernelName"], int(row["splitK"])] = float(row["us"])
    gains = []
    for shape, own in times.items():
        if solution := tunedgemm_triton.heuristic_fallback(shape, H200):
            gains.append(own["torch", "native", 0] / own["triton", solution.kernel_name, solution.split_k])
    assert len(gains) == 30
    assert min(gains) > 1.02
    assert statistics.geometric_mean(gains) > 1.13


CHANGES = (
    {"m": 2}, {"n": 16384, "k": 1024}, {"n": 1024, "k": 16384}, {"n": 2552}, {"outdtype": "fp32"},
    {"dtype": "fp32", "outdtype": "fp32"}, {"layout": "aiter16x16"},
    {"op": "a8w8", "dtype": "fp8_e4m3fn", "scale": "row"},
)  # fmt: skip


def test_both_types_of_16_bits_are_served() -> None:
    """The smallest product of the class gets a kernel in bf16 and fp16."""
    for dtype in ("bf16", "fp16"):
        assert tunedgemm_triton.heuristic_fallback(attrs.evolve(ONE_ROW, n=2560, dtype=dtype, outdtype=dtype), H200)


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_other_calls_are_left_to_torch(change: dict[str, Any]) -> None:
    """Unmeasured and slower classes get no kernel."""
    shape = attrs.evolve(ONE_ROW, **{"n": 4096, **change})
    assert tunedgemm_triton.heuristic_fallback(shape, H200) is None


@pytest.mark.parametrize("gfx", ["sm_80", "gfx942"])
def test_other_devices_get_no_kernel(gfx: str) -> None:
    """The gain was measured on Hopper alone."""
    assert tunedgemm_triton.heuristic_fallback(ONE_ROW, Device(gfx, 132)) is None
