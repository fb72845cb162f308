"""Test which untuned calls on Hopper get a generated kernel, and its measured gain."""

from __future__ import annotations

import csv
import itertools
import statistics
from pathlib import Path
from typing import Any

import attrs
import pytest
from tunedgemm.plugin import Device, Shape, Solution
from tunedgemm.testing.replay import read_times
from tunedgemm_asm import asm
from tunedgemm_asm.ptx import heuristic
from tunedgemm_asm.ptx.limits import unfit, units_of
from tunedgemm_asm.ptx.names import parse_name
from tunedgemm_asm.ptx.order import place_of

H200, H100 = Device("sm_90", 132, "nvidia-h200"), Device("sm_90", 132, "nvidia-h100-80gb-hbm3")
RESULTS = Path(__file__).parents[3] / "benchmarks/results"
LIKE = Shape("a8w8", 1024, 4096, 4096, "fp8_e4m3fn", "bf16", scale="row")
PLAIN = Shape("a16w16", 16, 8192, 4096)
BY_BLOCK = Shape("a8w8_blockscale", 64, 8192, 4096, "fp8_e4m3fn", "bf16", scale="block", extra={"scale_order": "m_major_padded"})


@pytest.mark.parametrize(
    ("file", "like", "least", "mean", "fewest"),
    [
        ("h200-2026-11-23/asm/a8w8-profile.csv", LIKE, 1.05, 1.14, 2),
        ("h100-2026-11-26/a8w8-trials.csv.gz", LIKE, 1.02, 1.2, 34),
        ("h100-2026-11-26/a16w16-trials.csv.gz", PLAIN, 0.99, 1.06, 40),
        ("h100-2026-11-26/a16w16-cold-trials.csv.gz", PLAIN, 1.0, 1.06, 40),
        ("h100-2026-11-26/a16w16-campaign-trials.csv.gz", PLAIN, 0.99, 1.04, 35),
        ("h200-2026-11-26/a16w16-trials.csv.gz", PLAIN, 0.975, 1.06, 50),
        ("h100-2026-11-26/a8w8_blockscale-trials.csv.gz", BY_BLOCK, 1.03, 1.2, 40),
        ("h100-2026-11-26/a8w8_blockscale-layers-trials.csv.gz", BY_BLOCK, 1.0, 1.32, 180),
        ("h200-2026-11-28/a8w8_blockscale-trials.csv.gz", BY_BLOCK, 0.99, 1.5, 24),
    ],
    ids=[
        "by row",
        "few rows of x by row",
        "16 bits",
        "16 bits, colder",
        "16 bits, more rows",
        "16 bits, H200",
        "by block",
        "layers by block",
        "by block, H200",
    ],
)
def test_the_kernel_of_an_untuned_call_was_faster_than_torchs(file: str, like: Shape, least: float, mean: float, fewest: int) -> None:
    """The untuned kernel lost less than 3 % to torch's call everywhere, and was faster in the mean."""
    gains = []
    for shape, times in read_times(RESULTS / file, like).items():
        solution = asm.heuristic_fallback(shape, H100 if file.startswith("h100") else H200)
        us = times.get(("asm", solution.kernel_name, solution.split_k)) if solution else None
        if us:
            gains.append(min(us for (libtype, *_), us in times.items() if libtype == "torch") / us)
    assert len(gains) >= fewest
    assert min(gains) > least
    assert statistics.geometric_mean(gains) > mean


@pytest.mark.parametrize(
    ("file", "like", "least", "mean", "fewest"),
    [
        ("h100-2026-11-26/a8w8-trials.csv.gz", LIKE, 0.92, 0.98, 34),
        ("h100-2026-11-26/a8w8-cold-trials.csv.gz", LIKE, 0.92, 0.98, 20),
        ("h200-2026-11-28/a8w8-trials.csv.gz", LIKE, 0.92, 0.95, 7),
        ("h100-2026-11-26/a8w8_blockscale-trials.csv.gz", BY_BLOCK, 0.81, 0.96, 40),
        ("h100-2026-11-26/a8w8_blockscale-layers-trials.csv.gz", BY_BLOCK, 0.81, 0.96, 180),
        ("h200-2026-11-28/a8w8_blockscale-trials.csv.gz", BY_BLOCK, 0.87, 0.965, 29),
    ],
    ids=["by row", "by row, colder", "by row, H200", "by block", "layers by block", "by block, H200"],
)
def test_an_fp8_guess_is_near_the_best_exact_kernel(file: str, like: Shape, least: float, mean: float, fewest: int) -> None:
    """The guess has this share of the speed of the fastest kernel that promotes, of those raced if it was.

    A race runs at a lower clock than the screening before it.
    """
    shares = []
    races = read_times(RESULTS / file, like, "ok")
    for shape, times in read_times(RESULTS / file, like).items():
        solution = asm.heuristic_fallback(shape, H100 if file.startswith("h100") else H200)
        guess = ("asm", solution.kernel_name, solution.split_k) if solution else None
        if guess in times and (like is not LIKE or shape.m <= 64):
            timed = races[shape] if guess in races.get(shape, {}) else times
            promoted = [us for (libtype, name, _), us in timed.items() if libtype == "asm" and parse_name(name).promoted]
            shares.append(min(promoted) / timed[guess])
    assert len(shares) >= fewest
    assert min(shares) > least
    assert statistics.geometric_mean(shares) > mean


@pytest.mark.parametrize(("m", "is_overlapped"), [(2, True), (8, True), (24, True), (48, True), (64, True), (65, False), (128, False)])
def test_few_rows_by_row_overlap_promotion(m: int, is_overlapped: bool) -> None:
    """A guess by row multiplies while it promotes, up to 64 rows of x."""
    solution = asm.heuristic_fallback(attrs.evolve(LIKE, m=m, n=10248), H100)
    assert solution is not None
    assert parse_name(solution.kernel_name).overlapped is is_overlapped


@pytest.mark.parametrize(("m", "is_overlapped"), [(65, True), (128, True), (256, True), (257, False)])
def test_more_rows_by_row_overlap_promotion_with_a_narrow_weight(m: int, is_overlapped: bool) -> None:
    """Up to 10240 rows of the weight, a guess by row overlaps up to 256 rows of x."""
    solution = asm.heuristic_fallback(attrs.evolve(LIKE, m=m, n=10240), H200)
    assert solution is not None
    assert parse_name(solution.kernel_name).overlapped is is_overlapped


@pytest.mark.parametrize(("m", "n", "k"), [(64, 58176, 1664), (64, 32768, 512), (128, 57344, 1536)])
def test_no_transposed_tile_of_two_consumers_has_many_rows(m: int, n: int, k: int) -> None:
    """Beyond 32 rows of x such tiles that overlap were always slower."""
    for like in (BY_BLOCK, LIKE):
        solution = asm.heuristic_fallback(attrs.evolve(like, m=min(m, 64) if like is LIKE else m, n=n, k=k), H200)
        assert solution is not None
        config = parse_name(solution.kernel_name)
        assert not (config.swapped and config.consumers > 1)


def test_tiles_of_a_guess_fill_the_multiprocessors() -> None:
    """An fp8 guess has a tile between those of a list, of which 132 multiprocessors take 116 at once."""
    solution = asm.heuristic_fallback(attrs.evolve(BY_BLOCK, m=256, n=2304, k=6144), H200)
    assert solution is not None
    assert parse_name(solution.kernel_name).tile_n == 80


def test_no_kernel_of_an_untuned_call_was_slower_than_torchs_in_a_process_without_tables() -> None:
    """Each kernel that was timed against torch's call reached 0.99 of its speed, in its interval."""
    slower, timed_rows = [], 0
    for row in csv.DictReader((RESULTS / "h100-2026-11-26/untuned-speed.csv").open(newline="")):
        like = {"a16w16": PLAIN, "a8w8": LIKE, "a8w8_blockscale": BY_BLOCK}[row["op"]]
        shape = attrs.evolve(like, m=int(row["M"]), n=int(row["N"]), k=int(row["K"]))
        solution = asm.heuristic_fallback(shape, H100)
        if solution is not None and str(solution) == row["solution"]:
            timed_rows += 1
            slower += [row] if float(row["high"]) < 0.99 else []
    assert timed_rows >= 115
    assert not slower


def test_the_first_of_the_list_by_block_was_rarely_slower_than_torchs() -> None:
    """The first listed kernel was slower than torch's call for two products of 40, by at most 6 %."""
    gains = []
    for shape, times in read_times(RESULTS / "h100-2026-11-26/a8w8_blockscale-trials.csv.gz", BY_BLOCK).items():
        first = next(iter(asm.solutions(shape, H200)))
        if us := times.get(("asm", first.kernel_name, first.split_k)):
            gains.append(times["torch", "native", 0] / us)
    assert len(gains) >= 40
    assert min(gains) > 0.94
    assert sum(gain < 1 for gain in gains) <= 2


def test_it_takes_the_call_with_sums_as_exact_as_torchs(failing: Any) -> None:
    """Large fp8 products get a promoted kernel with one CTA per cluster and one split."""

    def check(m: int, weight: tuple[int, int]) -> None:
        shape = attrs.evolve(LIKE, m=m, n=weight[0], k=weight[1], outdtype="fp16")
        solution = asm.heuristic_fallback(shape, H200)
        assert isinstance(solution, Solution)
        config = parse_name(solution.kernel_name)
        assert (config.promoted, config.cluster, solution.split_k, unfit(config, 1, shape)) == (True, 1, 1, None)
        assert asm.heuristic_fallback(shape, H200) == solution

    assert not failing(check, itertools.product([256, 300, 1023, 5000, 70_000], [(2048, 2048), (2056, 7168), (14_336, 8192)]))


@pytest.mark.parametrize("m", [2, 9, 16, 24, 31, 32])
def test_few_rows_of_x_share_one_tile(m: int) -> None:
    """The weight is read once, also where it has fewer tiles than half of the multiprocessors."""
    for like in (PLAIN, LIKE, BY_BLOCK):
        solution = asm.heuristic_fallback(attrs.evolve(like, m=m, n=4096, k=12288), H200)
        assert solution is not None
        config = parse_name(solution.kernel_name)
        assert (config.tile_b if config.swapped else config.tile_a) >= m


@pytest.mark.parametrize("m", [33, 48, 96, 128])
def test_tiles_of_x_that_share_rows_of_the_weight_run_side_by_side(m: int) -> None:
    """Listed kernels and the guess order tiles so that neighbouring CTAs read the same rows of the weight."""
    shape = attrs.evolve(PLAIN, m=m, n=4096, k=12288)
    for solution in (asm.heuristic_fallback(shape, H100), *asm.solutions(shape, H100)):
        assert solution is not None
        config = parse_name(solution.kernel_name)
        units = units_of(config, shape)
        place = place_of(1, *units, config.group)
        of_x, of_weight = (1, 0) if config.swapped else (0, 1)
        assert place[of_weight] == 0 if units[of_x] > 1 else place[of_x] == 0


@pytest.mark.parametrize(("m", "n", "device", "is_served"), [
    (33, 8192, H100, True), (128, 10240, H100, True), (65, 10232, H100, False), (64, 8192, H200, False), (64, 7160, H100, False),
    (256, 5120, H200, True), (256, 8192, H200, False), (192, 5120, H200, False), (256, 8192, H100, True),
    (256, 14336, H100, False), (257, 8192, H100, False), (16, 7168, H200, True), (16, 7176, H200, False),
    (16, 7176, H100, True), (32, 7168, H200, True), (32, 7176, H200, False), (32, 7176, H100, True), (32, 64, H200, True),
])  # fmt: skip
def test_sixteen_bits_by_device(m: int, n: int, device: Device, is_served: bool) -> None:
    """An H100 gets kernels of more rows and of wider weights than other devices."""
    assert (asm.heuristic_fallback(attrs.evolve(PLAIN, m=m, n=n), device) is not None) == is_served


def test_other_backends_serve_unmeasured_or_slower_classes(failing: Any) -> None:
    """Unmeasured or slower classes get no untuned kernel."""

    def check(shape: Shape) -> None:
        assert asm.heuristic_fallback(shape, H200) is None

    assert not failing(
        check,
        itertools.product(
            [
                *(attrs.evolve(LIKE, m=m, k=1008) for m in (65, 256, 5000)),
                attrs.evolve(LIKE, m=256, n=5128, k=14336),
                attrs.evolve(LIKE, m=257, k=14336),
                attrs.evolve(LIKE, m=512, k=12288),
                attrs.evolve(LIKE, m=1024, n=35840, k=5120),
                attrs.evolve(LIKE, m=4096, k=12288),
                attrs.evolve(LIKE, scale="tensor"),
                attrs.evolve(LIKE, dtype="int8"),
                *(attrs.evolve(PLAIN, m=m) for m in (1, 33, 1024)),
                *(attrs.evolve(PLAIN, m=m, n=2040, k=4104) for m in (1, 2, 32)),
                *(attrs.evolve(PLAIN, m=m, n=1024, k=1792) for m in (1, 4)),
                attrs.evolve(PLAIN, m=64, n=4104, k=128),
                attrs.evolve(PLAIN, m=64, n=512, k=2056),
                attrs.evolve(PLAIN, m=129, n=2496, k=504),
                attrs.evolve(PLAIN, outdtype="fp32"),
                *(attrs.evolve(BY_BLOCK, m=m, extra={}) for m in (2, 64, 255, 8192)),
                attrs.evolve(BY_BLOCK, m=16385),
            ]
        ),
    )


def test_every_call_by_block_of_the_class_gets_a_kernel_that_fits(failing: Any) -> None:
    """Sizes from the smallest weight to 129,280 rows get a kernel that serves them."""

    def check(m: int, n: int, k: int) -> None:
        shape = attrs.evolve(BY_BLOCK, m=m, n=n, k=k, extra=BY_BLOCK.extra if m > 1 else {})
        solution = asm.heuristic_fallback(shape, H200)
        assert solution is not None
        assert not asm.lacks(solution, shape, H200)

    weights = [(64, 128), (8, 16384), (512, 7168), (520, 16384), (1000, 2048), (4096, 256), (7168, 768), (32768, 512), (129280, 7168)]
    assert not failing(lambda m, weight: check(m, *weight), itertools.product([1, 2, 15, 33, 64, 65, 300, 4096, 8192], weights))


def test_idle_multiprocessors_share_k(failing: Any) -> None:
    """A weight of few rows is cut along K, and a large one is not."""

    def check(like: Shape, m: int) -> None:
        few, many = (asm.heuristic_fallback(attrs.evolve(like, m=m, n=n, k=k), H200) for n, k in ((256, 7168), (7168, 4096)))
        assert few is not None
        assert many is not None
        assert few.split_k > 1 == many.split_k

    assert not failing(check, [(LIKE, 1), (LIKE, 16), (LIKE, 64), (BY_BLOCK, 8), (BY_BLOCK, 64)])


@pytest.mark.parametrize(
    ("m", "n", "k", "tile_n", "has_panels"),
    [
        (4096, 7168, 8192, 256, True),
        (4096, 4608, 7168, 192, True),
        (4096, 2112, 7168, 192, True),
        (1024, 7168, 8192, 224, True),
        (1024, 10240, 5120, 128, True),
        (512, 36864, 7168, 192, True),
        (512, 4608, 7168, 160, False),
        (512, 4096, 7168, 128, False),
        (256, 36864, 7168, 192, False),
    ],
)
def test_many_rows_by_block_get_the_tile_that_was_the_fastest(m: int, n: int, k: int, tile_n: int, has_panels: bool) -> None:
    """The tile fills the rounds, as that of the fastest kernel did on an H200.

    TMA stores the outputs of several rounds.
    """
    solution = asm.heuristic_fallback(attrs.evolve(BY_BLOCK, m=m, n=n, k=k), H200)
    assert solution is not None
    config = parse_name(solution.kernel_name)
    assert (config.tile_m, config.tile_n, config.panels > 0) == (128, tile_n, has_panels)
    assert config.overlapped


@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (28672, 4096), (4096, 14336), (7168, 5120), (5120, 14336)])
def test_all_rows_of_x_share_few_kernels(n: int, k: int) -> None:
    """Prefill has every M. Its guesses are those of the multiples of 64, and few."""
    guesses = {m: asm.heuristic_fallback(attrs.evolve(BY_BLOCK, m=m, n=n, k=k), H200) for m in range(64, 16385, 64)}
    assert len(set(guesses.values())) <= 20
    for m in range(257, 16385, 61):
        assert asm.heuristic_fallback(attrs.evolve(BY_BLOCK, m=m, n=n, k=k), H200) == guesses[-(-m // 64) * 64]


@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (2304, 6144), (5120, 14336)])
def test_coarse_steps_of_many_rows_cost_no_time(n: int, k: int) -> None:
    """Beyond 1024 rows of x, guesses of multiples of 128 take less than 1 % longer than those of each M."""
    losses = []
    for m in range(1025, 16385, 733):
        shape = attrs.evolve(BY_BLOCK, m=m, n=n, k=k)
        solution, best = asm.heuristic_fallback(shape, H200), heuristic.guess_of(shape, H200)
        assert solution is not None and best is not None
        losses.append(heuristic.predicted_us(parse_name(solution.kernel_name), 1, shape, H200) / heuristic.predicted_us(*best, shape, H200))
    assert statistics.mean(losses) < 1.01


def test_row_major_scales_of_many_rows_by_block_get_a_kernel() -> None:
    """From 256 rows of x on, torch's call with row-major scales was slower."""
    shape = attrs.evolve(BY_BLOCK, m=256, extra={})
    solution = asm.heuristic_fallback(shape, H200)
    assert solution is not None
    assert not asm.lacks(solution, shape, H200)


def test_one_row_is_m_major() -> None:
    """The class of M-major scales has M = 1, whose strides are those of row-major scales, too."""
    one = attrs.evolve(BY_BLOCK, m=1, extra={})
    assert asm.heuristic_fallback(one, H100) is not None
    assert asm.heuristic_fallback(attrs.evolve(one, m=2), H100) is None


def test_a_product_of_too_many_tiles_gets_none() -> None:
    """No kernel has so many tiles, and torch reports the outputs that fit no memory."""
    assert asm.heuristic_fallback(attrs.evolve(LIKE, m=1 << 28, n=1 << 18), H200) is None


def test_guesses_on_an_h20_split_for_its_units_and_pad_no_rows() -> None:
    """Tensor cores of a quarter of the rate bound the time of padded rows; few units need few splits."""
    h20, pcie = Device("sm_90", 78, "nvidia-h20"), Device("sm_90", 114, "nvidia-h100-pcie")
    for m in (8, 16, 24):
        solution = asm.heuristic_fallback(attrs.evolve(PLAIN, m=m, n=2048, k=4096), h20)
        tile = parse_name(solution.kernel_name)
        assert tile.tile_m == m and not asm.lacks(solution, PLAIN, h20)
    for device, n, served in ((h20, 3328, True), (h20, 3456, False), (pcie, 4864, True), (pcie, 5120, False)):
        assert bool(asm.heuristic_fallback(attrs.evolve(PLAIN, m=16, n=n), device)) is served
    assert asm.heuristic_fallback(attrs.evolve(PLAIN, m=32, n=2048), h20) is None  # 37 rows take as long to multiply as to read
