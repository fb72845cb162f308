"""Order, variants and binding of solutions, and the search around a configuration."""

from __future__ import annotations

import ctypes
from typing import Any

import attrs
import pytest
from tunedgemm.plugin import Backend, Device, Launcher, Shape, Solution
from tunedgemm_hipblaslt import launch
from tunedgemm_hipblaslt.descriptors import Capabilities, HeuristicResult, ProblemDescriptors, locked_descriptors
from tunedgemm_hipblaslt.limits import make_problem
from tunedgemm_hipblaslt.names import KernelConfig, clusters, parse_name, tiles
from tunedgemm_hipblaslt.space import (
    allows_fast_accum,
    enumerate_changes,
    enumerate_neighbours,
    idle_share,
    nearest_options,
    nearest_tiles,
)

both = pytest.mark.parametrize("lt", ["cublaslt", "hipblaslt"], indirect=True)
nvidia = pytest.mark.parametrize("lt", ["cublaslt"], indirect=True)
amd = pytest.mark.parametrize("lt", ["hipblaslt"], indirect=True)
PLAIN = Shape("a16w16", 5, 48, 512)
BIASED = attrs.evolve(PLAIN, epilogue="bias", bias_dtype="bf16")
FP8 = Shape("a8w8", 5, 48, 512, dtype="fp8_e4m3fn", outdtype="bf16", scale="row")
#: The fake's results in its order (fake/algos_cublas.c): start of the name, split of K.
RESULTS = [
    ("id66_tile20_stages15_reduce0", 1), ("id66_tile20_stages14_reduce0", 1), ("id66_tile23_stages15_reduce0", 1),
    ("id66_tile20_stages15_reduce2", 2), ("id71_tile20_stages35_reduce0", 1), ("id71_tile23_stages35_reduce0", 1),
    ("id66_tile20_stages15_reduce2", 4), ("id21_tile20_stages8_reduce0", 1),
]  # fmt: skip

SEARCHED = Shape("a16w16", 200, 256, 512)
START = KernelConfig(66, tile=20, stages=15)
ABLE = Capabilities(tiles=(15, 17, 18, 20, 23, 24), stages=(14, 15, 16, 21), reductions=6, swizzles=1, options=3, split_k=True)
WIDE = (4096, 4096, 4096)


def enumerate_listed(lt: Backend, harness: Any, shape: Shape) -> list[Solution]:
    """Return the solutions of a shape."""
    return list(lt.solutions(shape, harness.CPU))


def suffixes(solutions: list[Solution]) -> list[str]:
    """Return the suffix of each name, "" for none."""
    return [next((suffix for suffix in ("fast", "after") if solution.kernel_name.endswith(suffix)), "") for solution in solutions]


@nvidia
def test_heuristic_results_come_first(lt: Backend, harness: Any) -> None:
    """cuBLASLt's results come in their order, then its results without a workspace, each once."""
    listed = enumerate_listed(lt, harness, PLAIN)
    named = [("_".join(solution.kernel_name.split("_")[:4]), solution.split_k) for solution in listed]
    assert named[: len(RESULTS)] == RESULTS
    assert len(named) > len(RESULTS), "results that split-K kernels pushed beyond the limit of eight"
    assert all(split_k == 1 for _, split_k in named[len(RESULTS) :])
    assert len(set(listed)) == len(listed)
    assert all(solution.kernel_name.endswith(("cluster0", "cluster2", "cluster3")) for solution in listed)


@amd
def test_all_indices_are_listed(lt: Backend, harness: Any) -> None:
    """hipBLASLt lists all indices that fit the shape, its best results first."""
    listed = enumerate_listed(lt, harness, PLAIN)
    indices = [solution.solidx for solution in listed]
    assert indices[:8] == list(range(1000, 1008))
    assert indices == sorted(indices)
    assert 1022 in indices
    assert [solution.kernel_name for solution in listed] == [f"sol{index}_v100200_fake0001" for index in indices]
    assert {solution.split_k for solution in listed} == {0}


@both
def test_bias_after_the_product(lt: Backend, harness: Any) -> None:
    """The first three results are also listed with the bias after them, where there is a bias."""
    plain, biased = enumerate_listed(lt, harness, PLAIN), enumerate_listed(lt, harness, BIASED)
    assert "after" not in suffixes(plain)
    assert suffixes(biased).count("after") == 3
    assert [solution.kernel_name for solution in biased[-3:]] == [f"{solution.kernel_name}_after" for solution in plain[:3]]


@pytest.mark.parametrize(("lt", "dtype"), [("cublaslt", "fp32"), ("hipblaslt", "fp16")], indirect=["lt"])
def test_a_bias_that_the_library_does_not_add(lt: Backend, harness: Any, dtype: str) -> None:
    """All results are then listed with the bias after them, and none with it in the epilogue."""
    listed = enumerate_listed(lt, harness, attrs.evolve(BIASED, bias_dtype=dtype))
    assert [solution.kernel_name for solution in listed] == [
        f"{solution.kernel_name}_after" for solution in enumerate_listed(lt, harness, PLAIN)
    ]


@nvidia
def test_fast_accumulators(lt: Backend, harness: Any) -> None:
    """fp8 into bf16 is also listed with the short accumulator, which the descriptor asks for."""
    listed = enumerate_listed(lt, harness, FP8)
    plain = [solution for solution, suffix in zip(listed, suffixes(listed), strict=True) if not suffix]
    fast = [solution for solution, suffix in zip(listed, suffixes(listed), strict=True) if suffix == "fast"]
    assert [solution.kernel_name for solution in fast] == [f"{solution.kernel_name}_fast" for solution in plain]
    assert listed.index(fast[0]) == len(plain)
    for fast_accum in (False, True):
        descriptors = ProblemDescriptors(lt.hooks.load(lt.hooks.abi), make_problem(FP8, fast_accum=fast_accum), -1)
        value, written = ctypes.c_int8(-1), ctypes.c_size_t()
        read = ctypes.CDLL(descriptors.library.path).cublasLtMatmulDescGetAttribute
        # 25 is CUBLASLT_MATMUL_DESC_FAST_ACCUM, of one byte.
        status = read(ctypes.c_void_p(descriptors.desc.address), 25, ctypes.byref(value), ctypes.c_size_t(1), ctypes.byref(written))
        assert (status, value.value) == (0, int(fast_accum))


def test_where_accumulators_may_be_fast(backends: dict[str, Backend]) -> None:
    """Fast accumulators are for fp8 into bf16 on Ada and Hopper, without blocks or batches."""
    cases = [
        (FP8, "sm_90", True),
        (FP8, "sm_89", True),
        (FP8, "sm_100", False),
        (attrs.evolve(FP8, outdtype="fp32"), "sm_90", False),
        (attrs.evolve(FP8, dtype="int8"), "sm_90", False),
        (PLAIN, "sm_90", False),
        (attrs.evolve(FP8, op="a8w8_blockscale", scale="block"), "sm_90", False),
        (attrs.evolve(FP8, op="batched_a8w8", extra={"B": 3}), "sm_90", False),
    ]
    cublaslt, hipblaslt = (lt.hooks.load(lt.hooks.abi) for lt in (backends["cublaslt"], backends["hipblaslt"]))
    faults = [
        (shape, gfx)
        for shape, gfx, fast in cases
        if allows_fast_accum(cublaslt, shape, Device(gfx, 132)) is not fast or allows_fast_accum(hipblaslt, shape, Device(gfx, 132))
    ]
    assert not faults


@both
def test_a_refused_result_is_not_listed(lt: Backend, harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result whose own status is a refusal is left out, and the others are listed."""
    shape = attrs.evolve(PLAIN, n=80)
    complete = enumerate_listed(lt, harness, shape)
    monkeypatch.setenv("FAKE_LT_REFUSED", "0")
    launch.results_by_index.cache_clear()
    reduced = enumerate_listed(lt, harness, shape)
    launch.results_by_index.cache_clear()
    assert complete[0] not in reduced
    assert set(reduced) < set(complete)
    assert complete[1] in reduced


@amd
def test_a_shape_without_algorithms(lt: Backend, harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library without an algorithm for a shape lists nothing."""
    monkeypatch.setenv("FAKE_LT_SOLUTIONS", "0")
    assert enumerate_listed(lt, harness, attrs.evolve(BIASED, n=56)) == []


def test_answers_that_no_name_reproduces(harness: Any, fake_library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an answer holds more than its name, `heuristic` is listed first and binds."""
    lt, shape = harness.make_backend(fake_library("cublaslt"), "cublaslt"), Shape("a16w16", 16, 256, 512)
    assert harness.FIRST not in {solution.kernel_name for solution in enumerate_listed(lt, harness, shape)}
    monkeypatch.setenv("FAKE_LT_ALIGNED", "1")
    first, *others = enumerate_listed(lt, harness, shape)
    assert first.kernel_name == harness.FIRST
    assert others
    assert not harness.make_case(shape).launch_fault(harness.bind(lt, first.kernel_name, shape))


def test_results_for_other_rows(harness: Any, fake_library: Any) -> None:
    """The library is also asked about half, twice and four times the rows; what fits is listed."""
    lt, shape = harness.make_backend(fake_library("cublaslt"), "cublaslt"), Shape("a16w16", 16, 256, 512)
    before = harness.count_calls(lt, "MatmulAlgoGetHeuristic")
    listed = enumerate_listed(lt, harness, shape)
    assert harness.count_calls(lt, "MatmulAlgoGetHeuristic") - before == 2 + 3
    for solution in listed:
        harness.bind(lt, solution.kernel_name, shape, split_k=solution.split_k)


def changes(
    start: KernelConfig, able: Capabilities = ABLE, sizes: tuple[int, int, int] = WIDE
) -> dict[tuple[str, ...], set[tuple[int, ...]]]:
    """Map the changed attributes to their values."""
    values: dict[tuple[str, ...], set[tuple[int, ...]]] = {}
    for other in enumerate_changes(start, able, sizes):
        names = tuple(field.name for field in attrs.fields(KernelConfig) if getattr(start, field.name) != getattr(other, field.name))
        values.setdefault(names, set()).add(tuple(getattr(other, name) for name in names))
    return values


def test_one_attribute_changes() -> None:
    """A neighbour differs in one attribute, or in the split of K with its reduction."""
    assert changes(START) == {
        ("tile",): {(15,), (17,), (18,), (23,), (24,)},
        ("stages",): {(14,), (16,), (21,)},
        ("cluster",): {(number,) for number, (rows, columns) in clusters().items() if rows * columns <= 4},
        ("reduction", "split_k"): {(reduction, split_k) for reduction in (2, 4) for split_k in (2, 3)},
        ("swizzle",): {(1,)},
        ("option",): {(1,), (2,), (3,)},
    }
    neighbours = list(enumerate_changes(START, ABLE, WIDE))
    assert len(neighbours) == len(set(neighbours))
    assert START not in neighbours


def test_splits_of_k() -> None:
    """Splits change by one or a factor up to 3, within 32 parts of at least 256 elements."""
    start = attrs.evolve(START, split_k=4, reduction=2)

    def splits(config: KernelConfig, k: int) -> set[tuple[int, int]]:
        others = enumerate_changes(config, ABLE, (4096, 4096, k))
        return {(other.split_k, other.reduction) for other in others if other.tile == 20 and other.stages == 15}

    expected = {(1, 0), *((split_k, reduction) for split_k in (2, 3, 4, 5, 8, 12) for reduction in (2, 4))}
    assert splits(start, 1 << 14) | {(4, 2)} == expected
    assert {split_k for split_k, _ in splits(start, 5 * 256)} == {1, 2, 3, 4, 5}
    assert {split_k for split_k, _ in splits(attrs.evolve(start, split_k=20), 1 << 14)} == {1, 10, 19, 20, 21}
    assert {split_k for split_k, _ in splits(START, 511)} == {1}


def test_missing_capabilities() -> None:
    """Attribute values that the algorithm does not accept are not tried."""
    least = Capabilities(tiles=(20,), stages=(15,), reductions=0, swizzles=0, options=0, split_k=False)
    assert set(changes(START, least)) == {("cluster",)}
    assert ("reduction", "split_k") not in changes(START, attrs.evolve(ABLE, reductions=0))
    assert changes(START, attrs.evolve(ABLE, reductions=1))["reduction", "split_k"] == {(1, 2), (1, 3)}


def test_nearest_tiles() -> None:
    """Near tiles have sides of half to twice the length, within twice the output's."""
    possible = list(tiles())
    near = nearest_tiles(20, possible, WIDE)
    assert near[0] == 20
    assert len(near) == 9
    assert all(64 <= side <= 256 for number in near for side in tiles()[number])
    small = nearest_tiles(20, possible, (64, 16, 512))
    assert all(rows <= 128 and columns <= 128 for rows, columns in (tiles()[number] for number in small))
    assert nearest_tiles(20, [23], (4096, 128, 512)) == []
    assert nearest_tiles(20, [23], (4096, 129, 512)) == [23]
    assert nearest_tiles(20, [24], (128, 4096, 512)) == []
    assert nearest_tiles(20, [9999], WIDE) == []
    assert nearest_tiles(0, [4, 5, 6], WIDE) == [4, 5, 6], "the library's own choice has no sides"


def test_nearest_options() -> None:
    """All of few options are tried; of many, 0 and those a power of two away."""
    cases = [
        (0, 0, [0]),
        (3, 8, list(range(9))),
        (0, 9, [0, 1, 2, 4, 8]),
        (20, 40, [0, 4, 12, 16, 18, 19, 21, 22, 24, 28, 36]),
        (40, 40, [0, 24, 32, 36, 38, 39]),
    ]
    for option, largest, expected in cases:
        assert sorted(nearest_options(option, largest)) == expected


def test_idle_share() -> None:
    """The idle share is that of the last wave in all waves; 0 for unknown waves."""
    for waves, idle in ((0.0, 0.0), (1.0, 0.0), (0.25, 0.75), (1.5, 0.25), (2.0, 0.0), (3.99, 0.0025)):
        assert idle_share(waves) == pytest.approx(idle)


@nvidia
def test_neighbours_are_accepted(lt: Any, harness: Any) -> None:
    """Each neighbour binds and gives the right numbers."""
    first = next(iter(lt.solutions(SEARCHED, harness.CPU)))
    assert parse_name(first.kernel_name, first.split_k).algorithm == attrs.evolve(START, split_k=1)
    case, neighbours = harness.make_case(SEARCHED), list(lt.refine(first, SEARCHED, harness.CPU))
    assert len(neighbours) > 8
    assert len(set(neighbours)) == len(neighbours)
    for solution in neighbours:
        launcher = lt.bind(solution, SEARCHED, harness.CPU)
        assert isinstance(launcher, Launcher), solution
        assert not case.launch_fault(launcher), solution


@nvidia
def test_the_workspace_bounds_the_neighbours(lt: Any, harness: Any) -> None:
    """Without a workspace the neighbours that split K are left out."""
    with locked_descriptors(lt.hooks.load(lt.hooks.abi), make_problem(SEARCHED), -1) as descriptors:
        every = [config for config, _ in enumerate_neighbours(descriptors, START, 1 << 30)]
        without = [config for config, _ in enumerate_neighbours(descriptors, START, 0)]
    assert [config for config in every if config.split_k == 1] == without
    assert any(config.split_k > 1 for config in every)


@nvidia
def test_a_tile_has_no_more_rows_than_a_scale(lt: Any, harness: Any) -> None:
    """With block scales, tiles of 256 rows are left out though the library accepts them."""
    for op, scale, most in (("a8w8", "row", 256), ("a8w8_blockscale", "block", 128)):
        problem = make_problem(Shape(op, 2048, 2048, 1024, "fp8_e4m3fn", "bf16", scale=scale))
        with locked_descriptors(lt.hooks.load(lt.hooks.abi), problem, -1) as descriptors:
            start = descriptors.read_config(descriptors.heuristic_results(1, 1 << 30)[0].algo)
            neighbours = enumerate_neighbours(descriptors, attrs.evolve(start, tile=20, split_k=1), 1 << 30)
            assert max(tiles()[config.tile][0] for config, _ in neighbours) == most


@nvidia
def test_waves_bound_the_neighbours(lt: Any, harness: Any) -> None:
    """A neighbour whose last wave is much emptier is left out."""
    shape = Shape("a16w16", 128 * 12, 128 * 11, 64)  # 132 tiles of 128x128
    with locked_descriptors(lt.hooks.load(lt.hooks.abi), make_problem(shape), -1) as descriptors:
        tried = {config.tile for config, _ in enumerate_neighbours(descriptors, START, 0)}
        answers = {tile: descriptors.check(attrs.evolve(START, tile=tile)) for tile in ABLE.tiles}
    waves = {tile: answer.waves for tile, answer in answers.items() if isinstance(answer, HeuristicResult)}
    assert waves[20] == pytest.approx(1.0)
    assert waves[23] == pytest.approx(66 / 132)
    assert 23 not in tried
    assert 18 in tried, "two full waves"


@nvidia
def test_the_search_ends_at_the_fastest(lt: Any, harness: Any) -> None:
    """Following the best neighbour ends at the fake's fastest configuration."""
    for shape in (
        SEARCHED,
        attrs.evolve(SEARCHED, dtype="fp32", outdtype="fp32"),
        Shape("a8w8", 200, 256, 512, dtype="fp8_e4m3fn", outdtype="bf16", scale="row"),
    ):
        descriptors = ProblemDescriptors(lt.hooks.load(lt.hooks.abi), make_problem(shape), -1)

        def cost(solution: Solution, descriptors: ProblemDescriptors = descriptors) -> float:
            result = launch.find_algorithm(descriptors, parse_name(solution.kernel_name, solution.split_k), -1)
            assert isinstance(result, HeuristicResult)
            return float(harness.cost(lt, result.algo))

        solution, steps = next(iter(lt.solutions(shape, harness.CPU))), 0
        assert cost(solution) > 300
        while cost(best := min([solution, *lt.refine(solution, shape, harness.CPU)], key=cost)) < cost(solution):
            solution, steps = best, steps + 1
        assert cost(solution) == 150, "the least that the fake's configurations cost"
        assert steps <= 6
        assert solution not in enumerate_listed(lt, harness, shape)


def test_solutions_without_neighbours(backends: dict[str, Backend], harness: Any) -> None:
    """Only a configuration of cuBLASLt has neighbours."""
    index, config = "sol1003_v100200_fake0001", "id66_tile20_stages15_reduce0_swizzle0_option0_inner0_cluster0"
    for libtype, names in (("cublaslt", ("heuristic", "nonsense", index)), ("hipblaslt", (index, config))):
        for name in names:
            assert list(backends[libtype].refine(Solution(libtype, name), SEARCHED, harness.CPU)) == []


@nvidia
def test_a_larger_tile_has_other_stages(lt: Any, harness: Any) -> None:
    """A tile that does not fit its stages is tried with the nearest others."""
    start = Solution(lt.hooks.abi.libtype, "id66_tile20_stages21_reduce0_swizzle0_option0_inner0_cluster0", split_k=1)
    neighbours = {solution.kernel_name.split("_reduce")[0] for solution in lt.refine(start, SEARCHED, harness.CPU)}
    assert {"id66_tile23_stages16", "id66_tile17_stages21"} <= neighbours
    assert "id66_tile23_stages21" not in neighbours
    assert "id66_tile17_stages16" not in neighbours
