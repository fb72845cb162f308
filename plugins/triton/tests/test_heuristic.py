"""Test which untuned calls get a kernel without a JSON file, and its measured gain."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import attrs
import pytest
import tunedgemm_triton
from tunedgemm.plugin import Device, Shape
from tunedgemm.testing.replay import read_times

H200 = Device("sm_90", 132, "nvidia-h200")
RESULTS = Path(__file__).parents[3] / "benchmarks/results"
ONE_ROW = Shape("a16w16", 1, 6144, 4096)
FP8 = Shape("a8w8", 1, 6144, 4096, "fp8_e4m3fn", "bf16", scale="row")
BY_BLOCK = attrs.evolve(FP8, op="a8w8_blockscale", scale="block")


@pytest.fixture(autouse=True)
def without_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide the JSON files of the user."""
    monkeypatch.setenv("TUNEDGEMM_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("file", "like", "products", "least", "mean"),
    [
        ("h100-2026-11-26/a16w16-cold-trials.csv.gz", ONE_ROW, 30, 1.03, 1.12),
        ("h200-2026-11-26/a16w16-trials.csv.gz", ONE_ROW, 22, 1.01, 1.1),
        ("h100-2026-11-26/a8w8-cold-trials.csv.gz", FP8, 12, 1.13, 1.4),
        ("h100-2026-11-26/a8w8_blockscale-layers-trials.csv.gz", BY_BLOCK, 4, 1.9, 2.6),
        ("h200-2026-11-28/a8w8_blockscale-trials.csv.gz", BY_BLOCK, 2, 2.4, 2.7),
    ],
    ids=["bf16 on an H100", "bf16 on an H200", "fp8", "by block", "by block on an H200"],
)
def test_the_kernel_of_few_rows_was_faster_than_torchs(file: str, like: Shape, products: int, least: float, mean: float) -> None:
    """The kernel of an untuned call was faster than torch's in each timed product of the class."""
    gains = []
    for shape, own in read_times(RESULTS / file, like).items():
        if shape.m == like.m and (solution := tunedgemm_triton.triton.heuristic_fallback(shape, H200)):
            torchs = min(us for (libtype, *_), us in own.items() if libtype == "torch")
            if us := own.get(("triton", solution.kernel_name, solution.split_k)):  # a log may leave out the slowest
                gains.append(torchs / us)
    assert len(gains) >= products
    assert min(gains) > least
    assert statistics.geometric_mean(gains) > mean


CHANGES = (
    {"m": 2}, {"n": 16384, "k": 1024}, {"n": 1024, "k": 16384}, {"n": 2552}, {"outdtype": "fp32"},
    {"dtype": "fp32", "outdtype": "fp32"}, {"layout": "aiter16x16"},
)  # fmt: skip
FP8_CHANGES = (
    {"m": 65},
    {"m": 33, "n": 32768},
    {"n": 56, "k": 32768},
    {"n": 32768, "k": 2032},
    {"n": 256, "k": 2048},
    {"scale": "tensor"},
    {"dtype": "int8"},
    {"outdtype": "fp32"},
)


def test_both_types_of_16_bits_are_served() -> None:
    """The smallest product of the class gets a kernel in bf16 and fp16."""
    for dtype in ("bf16", "fp16"):
        assert tunedgemm_triton.triton.heuristic_fallback(attrs.evolve(ONE_ROW, n=2560, dtype=dtype, outdtype=dtype), H200)


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_other_calls_are_left_to_torch(change: dict[str, Any]) -> None:
    """Unmeasured and slower classes get no kernel."""
    shape = attrs.evolve(ONE_ROW, **{"n": 4096, **change})
    assert tunedgemm_triton.triton.heuristic_fallback(shape, H200) is None


@pytest.mark.parametrize("change", FP8_CHANGES, ids=str)
def test_other_calls_of_8_bits_are_left_to_others(change: dict[str, Any]) -> None:
    """In fp8 only large weights with scales by row get a kernel."""
    assert tunedgemm_triton.triton.heuristic_fallback(attrs.evolve(FP8, **change), H200) is None


@pytest.mark.parametrize("m", [1, 16, 1024])
def test_weights_alone_are_left_to_torch(m: int) -> None:
    """No kernel of a16wn was timed on a GPU, so only rows name one."""
    shape = Shape("a16wn", m, 6144, 4096, scale="block", extra={"w_format": "gptq_int4", "w_group": 128})
    assert tunedgemm_triton.triton.heuristic_fallback(shape, H200) is None


@pytest.mark.parametrize("gfx", ["sm_80", "gfx942"])
def test_other_devices_get_no_kernel(gfx: str) -> None:
    """The gain was measured on Hopper alone."""
    assert tunedgemm_triton.triton.heuristic_fallback(ONE_ROW, Device(gfx, 132)) is None
