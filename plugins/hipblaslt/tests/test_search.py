"""The search around a configuration of cuBLASLt: which neighbours it tries, and where following them leads."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from tunedgemm.plugin import Launcher, Shape, Solution
from tunedgemm_hipblaslt import launch
from tunedgemm_hipblaslt.descriptors import Capabilities, HeuristicResult, ProblemDescriptors, locked_descriptors
from tunedgemm_hipblaslt.limits import make_problem
from tunedgemm_hipblaslt.names import KernelConfig, clusters, parse, tiles
from tunedgemm_hipblaslt.space import enumerate_changes, enumerate_neighbours, idle_share, nearest_options, nearest_tiles

nvidia = pytest.mark.parametrize("lt", ["cublaslt"], indirect=True)
SHAPE = Shape("a16w16", 200, 256, 512)
HERE = KernelConfig(66, tile=20, stages=15)
ABLE = Capabilities(tiles=(15, 17, 18, 20, 23, 24), stages=(14, 15, 16, 21), reductions=6, swizzles=1, options=3, split_k=True)
WIDE = (4096, 4096, 4096)


def steps(here: KernelConfig, able: Capabilities = ABLE, sizes: tuple[int, int, int] = WIDE) -> dict[tuple[str, ...], set[tuple[int, ...]]]:
    """The changed attributes -> their values."""
    found: dict[tuple[str, ...], set[tuple[int, ...]]] = {}
    for other in enumerate_changes(here, able, sizes):
        names = tuple(field.name for field in attrs.fields(KernelConfig) if getattr(here, field.name) != getattr(other, field.name))
        found.setdefault(names, set()).add(tuple(getattr(other, name) for name in names))
    return found


def test_one_attribute_at_a_time() -> None:
    """A neighbour differs in one attribute, or in the parts of K together with the way to sum them up."""
    assert steps(HERE) == {
        ("tile",): {(15,), (17,), (18,), (23,), (24,)},
        ("stages",): {(14,), (16,), (21,)},
        ("cluster",): {(number,) for number, (rows, columns) in clusters().items() if rows * columns <= 4},
        ("reduction", "split_k"): {(way, parts) for way in (2, 4) for parts in (2, 3)},
        ("swizzle",): {(1,)},
        ("option",): {(1,), (2,), (3,)},
    }


def test_each_neighbour_is_tried_once() -> None:
    """No neighbour comes twice, and none is where the search stands."""
    found = list(enumerate_changes(HERE, ABLE, WIDE))
    assert len(found) == len(set(found))
    assert HERE not in found


def test_parts_of_k() -> None:
    """From some parts: one more, one less, twice, half, three times, none; each part keeps 256 elements of K, and 32 parts are the most."""
    split = attrs.evolve(HERE, split_k=4, reduction=2)

    def parts(here: KernelConfig, k: int) -> set[tuple[int, int]]:
        return {
            (each.split_k, each.reduction)
            for each in enumerate_changes(here, ABLE, (4096, 4096, k))
            if each.tile == 20 and each.stages == 15
        }

    near = {1: {0}, 2: {2, 4}, 3: {2, 4}, 4: {2, 4}, 5: {2, 4}, 8: {2, 4}, 12: {2, 4}}
    assert {each for each in parts(split, 1 << 14) if each != (4, 2)} == {
        (number, way) for number, ways in near.items() for way in ways if (number, way) != (4, 2)
    }
    assert {number for number, _ in parts(split, 5 * 256)} == {1, 2, 3, 4, 5}
    assert {number for number, _ in parts(attrs.evolve(split, split_k=20), 1 << 14)} == {1, 10, 19, 20, 21}
    assert {number for number, _ in parts(HERE, 511)} == {1}


def test_what_an_algorithm_cannot_is_not_tried() -> None:
    """Without split K, swizzle, options and other tiles and stages, only clusters are left."""
    least = Capabilities(tiles=(20,), stages=(15,), reductions=0, swizzles=0, options=0, split_k=False)
    assert set(steps(HERE, least)) == {("cluster",)}
    assert ("reduction", "split_k") not in steps(HERE, attrs.evolve(ABLE, reductions=0))
    assert steps(HERE, attrs.evolve(ABLE, reductions=1))["reduction", "split_k"] == {(1, 2), (1, 3)}


def test_tiles_nearby() -> None:
    """Sides of at most twice or half, nearest first; larger sides only where the output fills them more than half."""
    possible = list(tiles())
    near = nearest_tiles(20, possible, WIDE)
    assert near[0] == 20
    assert len(near) == 25
    assert all(64 <= side <= 256 for number in near for side in tiles()[number])
    small = nearest_tiles(20, possible, (64, 16, 512))
    assert all(rows <= 128 and columns <= 128 for rows, columns in (tiles()[number] for number in small))
    assert nearest_tiles(20, [23], (4096, 128, 512)) == []
    assert nearest_tiles(20, [23], (4096, 129, 512)) == [23]
    assert nearest_tiles(20, [24], (128, 4096, 512)) == []
    assert nearest_tiles(20, [9999], WIDE) == []
    assert nearest_tiles(0, [4, 5, 6], WIDE) == [4, 5, 6], "the library's own choice has no sides"


@pytest.mark.parametrize(
    ("option", "largest", "wanted"),
    [
        (0, 0, [0]),
        (3, 8, list(range(9))),
        (0, 9, [0, 1, 2, 4, 8]),
        (20, 40, [0, 4, 12, 16, 18, 19, 21, 22, 24, 28, 36]),
        (40, 40, [0, 24, 32, 36, 38, 39]),
    ],
)
def test_options_nearby(option: int, largest: int, wanted: list[int]) -> None:
    """All of few options; of many, none and those a power of two away."""
    assert sorted(nearest_options(option, largest)) == wanted


@pytest.mark.parametrize(("waves", "idle"), [(0.0, 0.0), (1.0, 0.0), (0.25, 0.75), (1.5, 0.25), (2.0, 0.0), (3.99, 0.0025)])
def test_idle(waves: float, idle: float) -> None:
    """The share of all waves that the last leaves unused; nothing where the library does not tell."""
    assert idle_share(waves) == pytest.approx(idle)


@nvidia
def test_neighbours_are_accepted(lt: Any, over: Any) -> None:
    """The library takes every neighbour, within the scratch that there is; each binds, and is right."""
    first = next(iter(lt.enumerate_solutions(SHAPE, over.CPU)))
    assert parse(first.kernel_name, first.split_k).algorithm == attrs.evolve(HERE, split_k=1)
    case, found = over.case(SHAPE), list(lt.refine(first, SHAPE, over.CPU))
    assert len(found) > 8
    assert len(set(found)) == len(found)
    for solution in found:
        answer = lt.bind(solution, SHAPE, over.CPU)
        assert isinstance(answer, Launcher), solution
        assert not case.launched(answer), solution


@nvidia
def test_scratch_bounds_the_neighbours(lt: Any, over: Any) -> None:
    """Neighbours that want more scratch than given are left out: all that split K."""
    with locked_descriptors(lt.load(lt.abi), make_problem(SHAPE), -1) as described:
        every = [algorithm for algorithm, _ in enumerate_neighbours(described, HERE, 1 << 30)]
        without = [algorithm for algorithm, _ in enumerate_neighbours(described, HERE, 0)]
    assert [each for each in every if each.split_k == 1] == without
    assert any(each.split_k > 1 for each in every)


@nvidia
@pytest.mark.parametrize(("op", "scale", "most"), [("a8w8", "row", 256), ("a8w8_blockscale", "block", 128)])
def test_a_tile_has_no_more_rows_than_a_scale(lt: Any, over: Any, op: str, scale: str, most: int) -> None:
    """With scales of blocks tiles of 256 rows are left out, whatever the library accepts."""
    problem = make_problem(Shape(op, 2048, 2048, 1024, "fp8_e4m3fn", "bf16", scale=scale))
    with locked_descriptors(lt.load(lt.abi), problem, -1) as described:
        start = described.read_config(described.heuristic_results(1, 1 << 30)[0].algo)
        taken = {algorithm.tile for algorithm, _ in enumerate_neighbours(described, attrs.evolve(start, tile=20, split_k=1), 1 << 30)}
    assert max(tiles()[tile][0] for tile in taken) == most


@nvidia
def test_waves_bound_the_neighbours(lt: Any, over: Any) -> None:
    """A neighbour whose last wave is much emptier is left out: 132 tiles fill an H200, 133 do not."""
    shape = Shape("a16w16", 128 * 12, 128 * 11, 64)  # 132 tiles of 128x128
    with locked_descriptors(lt.load(lt.abi), make_problem(shape), -1) as described:
        taken = {algorithm.tile for algorithm, found in enumerate_neighbours(described, HERE, 0)}
        waves = {
            tile: found.waves for tile in ABLE.tiles if isinstance(found := described.check(attrs.evolve(HERE, tile=tile)), HeuristicResult)
        }
    assert waves[20] == pytest.approx(1.0)
    assert waves[23] == pytest.approx(66 / 132)
    assert 23 not in taken
    assert 18 in taken, "two full waves"


@nvidia
@pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        Shape("a16w16", 200, 256, 512, dtype="fp32", outdtype="fp32"),
        Shape("a8w8", 200, 256, 512, dtype="fp8_e4m3fn", outdtype="bf16", scale="row"),
    ],
    ids=str,
)
def test_following_the_best_leads_to_the_fastest(lt: Any, over: Any, shape: Shape) -> None:
    """From the first answer, the best neighbour of the best neighbour and so on is the fake's cheapest configuration of all."""

    def cost(solution: Solution) -> float:
        found = launch.find_algorithm(
            ProblemDescriptors(lt.load(lt.abi), make_problem(shape), -1), parse(solution.kernel_name, solution.split_k), -1
        )
        assert isinstance(found, HeuristicResult)
        return float(over.cost(lt, found.algo))

    here, count = next(iter(lt.enumerate_solutions(shape, over.CPU))), 0
    assert cost(here) > 300
    while cost(best := min([here, *lt.refine(here, shape, over.CPU)], key=cost)) < cost(here):
        here, count = best, count + 1
    assert cost(here) == 150, "test_fake_algorithms tries them all"
    assert count <= 6
    assert here not in list(lt.enumerate_solutions(shape, over.CPU))


@pytest.mark.parametrize(
    ("lt", "name"),
    [
        *(("cublaslt", name) for name in ("heuristic", "nonsense", "sol1003_v100200_fake0001")),
        *(("hipblaslt", name) for name in ("sol1003_v100200_fake0001", "id66_tile20_stages15_reduce0_swizzle0_option0_inner0_cluster0")),
    ],
    indirect=["lt"],
)
def test_what_has_no_neighbours(lt: Any, over: Any, name: str) -> None:
    """Only a configuration of cuBLASLt has neighbours."""
    assert list(lt.refine(Solution(lt.abi.libtype, name), SHAPE, over.CPU)) == []


@nvidia
def test_neighbours_keep_endings(lt: Any, over: Any) -> None:
    """The neighbours of a solution that adds its bias after the product do so, too."""
    shape = attrs.evolve(SHAPE, epilogue="bias", bias_dtype="bf16")
    after = next(found for found in lt.enumerate_solutions(shape, over.CPU) if found.kernel_name.endswith("_after"))
    found = list(lt.refine(after, shape, over.CPU))
    assert found
    assert all(solution.kernel_name.endswith("_after") for solution in found)


@nvidia
def test_a_larger_tile_has_other_stages_where_its_own_do_not_fit(lt: Any, over: Any) -> None:
    """Tiles that are refused with as many stages are tried with the nearest others; those that fit keep theirs."""
    start = Solution(lt.abi.libtype, "id66_tile20_stages21_reduce0_swizzle0_option0_inner0_cluster0", split_k=1)
    found = {solution.kernel_name.split("_reduce")[0] for solution in lt.refine(start, Shape("a16w16", 200, 256, 512), over.CPU)}
    assert {"id66_tile23_stages16", "id66_tile17_stages21"} <= found
    assert "id66_tile23_stages21" not in found
    assert "id66_tile17_stages16" not in found
