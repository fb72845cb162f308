"""Test which untuned calls on Hopper get a generated kernel, and its measured gain."""

from __future__ import annotations

import csv
import itertools
import statistics
from pathlib import Path
from typing import Any

import attrs
from tunedgemm.plugin import Device, Shape, Solution
from tunedgemm_asm import asm
from tunedgemm_asm.ptx.limits import unfit
from tunedgemm_asm.ptx.names import parse_name

H200 = Device("sm_90", 132, "nvidia-h200")
PROFILE = Path(__file__).parents[3] / "benchmarks/results/h200-2026-11-23/asm/a8w8-profile.csv"
LIKE = Shape("a8w8", 1024, 4096, 4096, "fp8_e4m3fn", "bf16", scale="row")


def timed() -> dict[tuple[int, int, int], dict[tuple[str, str, int], float]]:
    """Return microseconds by (M, N, K), then by libtype, kernel and splits; failures have none."""
    found: dict[tuple[int, int, int], dict[tuple[str, str, int], float]] = {}
    with PROFILE.open(newline="") as file:
        for row in csv.DictReader(file):
            if float(row["us"]):
                size = int(row["M"]), int(row["N"]), int(row["K"])
                found.setdefault(size, {})[row["libtype"], row["kernelName"], int(row["splitK"])] = float(row["us"])
    return found


def test_the_kernel_of_an_untuned_call_was_faster_than_torchs() -> None:
    """The untuned kernel was faster than torch in every measurement, 1.2 times in the mean."""
    gains = []
    for (m, n, k), times in timed().items():
        solution = asm.heuristic_fallback(attrs.evolve(LIKE, m=m, n=n, k=k), H200)
        assert solution is not None
        if us := times.get(("asm", solution.kernel_name, solution.split_k)):
            gains.append(min(us for (libtype, *_), us in times.items() if libtype == "torch") / us)
    assert len(gains) >= 5
    assert min(gains) > 1.05
    assert statistics.geometric_mean(gains) > 1.2


def test_it_takes_the_call_with_sums_as_exact_as_torchs(failing: Any) -> None:
    """Large fp8 products get a promoted kernel with one CTA per cluster and one split."""

    def check(m: int, weight: tuple[int, int]) -> None:
        shape = attrs.evolve(LIKE, m=m, n=weight[0], k=weight[1], outdtype="fp16")
        solution = asm.heuristic_fallback(shape, H200)
        assert isinstance(solution, Solution)
        config = parse_name(solution.kernel_name)
        assert (config.promoted, config.cluster, solution.split_k, unfit(config, 1, shape)) == (True, 1, 1, None)
        assert asm.heuristic_fallback(shape, H200) == solution

    assert not failing(
        check, itertools.product([256, 300, 1023, 5000, 70_000], [(2048, 2048), (2056, 7168), (7168, 18432), (57_344, 8192)])
    )


def test_other_backends_serve_unmeasured_or_slower_classes(failing: Any) -> None:
    """Unmeasured or slower classes get no untuned kernel."""

    def check(shape: Shape) -> None:
        assert asm.heuristic_fallback(shape, H200) is None

    assert not failing(
        check,
        itertools.product(
            [
                attrs.evolve(LIKE, m=255),
                attrs.evolve(LIKE, n=2040),
                attrs.evolve(LIKE, k=2032),
                attrs.evolve(LIKE, k=4104),
                attrs.evolve(LIKE, scale="tensor"),
                attrs.evolve(LIKE, dtype="int8"),
                Shape("a16w16", 1024, 4096, 4096),
                Shape("a8w8_blockscale", 1024, 4096, 4096, "fp8_e4m3fn", "bf16", scale="block"),
            ]
        ),
    )
