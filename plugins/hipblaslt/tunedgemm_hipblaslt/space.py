"""List the solutions of a shape, the library's best first, and the neighbours of one.

One kind of product has some ten million configurations in cuBLASLt. The library accepts tens of
thousands of them, and nearly all are slow. The library's answers come first. The search then
changes one attribute of the best at a time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence

import attrs
from tunedgemm.plugin import Device, PluginError, Shape, Solution
from tunedgemm.tools.launching import ARCHITECTURES, dtype_bits

from tunedgemm_hipblaslt.descriptors import Capabilities, HeuristicResult, ProblemDescriptors, locked_descriptors
from tunedgemm_hipblaslt.launch import ALL_RESULTS, TOP_RESULTS, results_by_index
from tunedgemm_hipblaslt.library import Library, library_build
from tunedgemm_hipblaslt.limits import BLOCK, Problem, make_problem
from tunedgemm_hipblaslt.names import AlgorithmIndex, KernelConfig, SolutionName, clusters, parse_name, tiles

#: Devices with a shorter fp8 accumulator, which are those without fp4, and the outputs for which it
#: is accurate enough.
_FAST_GFX, _FAST_OUTPUTS = ARCHITECTURES.having(matrix=("mma", "wgmma"), fp8="fp8_e4m3fn", fp4=False), ("bf16",)
#: Largest M other than the shape's that the library is asked about.
_MAX_ROWS = 1 << 20
#: Answers that are also listed with the bias added after the product.
_BIAS_AFTER = 3

#: Largest ratio between the sides of neighbouring tiles.
_SIDE_RATIO = 2.0
#: Tiles to try, out of the nearest that the library is asked about. Hopper has a tile every 8
#: elements: the nearest few differ only in how they fill the last wave. To try 24 took a tenth more
#: time and found none faster (16 products in bf16, H100).
_TILES_TRIED, _TILES_CHECKED = 8, 256
#: Other stages to try with a tile that does not fit its own.
_OTHER_STAGES = 3
#: Octaves of wasted time that weigh as much as one octave between the sides of two tiles.
_DISTANCE_WEIGHT = 0.5
#: CTAs in a cluster at most. More are not portable and rarely pay.
_CLUSTER_SIZE = 4
#: Largest split of K, and the fewest elements of K in each part.
_MAX_SPLIT, _MIN_PART = 32, 256
#: Largest custom option up to which all values are tried. Beyond it only nearby values are.
_ALL_OPTIONS = 8
#: Largest increase of the idle share of the last wave.
_IDLE_INCREASE = 0.35


def enumerate_solutions(library: Library, shape: Shape, device: Device) -> Iterator[Solution]:
    """List the library's algorithms: all of hipBLASLt, the heuristic's of cuBLASLt.

    Each is listed with the bias in its epilogue, and the first few also with the bias after the
    product. Where the library adds no bias of that dtype, all are listed with the bias after it.
    """
    in_epilogue = _list_algorithms(library, _nearby_problems(shape), device.index)
    for algorithm in in_epilogue:
        yield solution_of(library, SolutionName(algorithm))
    if allows_fast_accum(library, shape, device):
        for algorithm in _list_algorithms(library, _nearby_problems(shape, fast_accum=True), device.index):
            yield solution_of(library, SolutionName(algorithm, fast_accum=True))
    if make_problem(shape).bias_dtype:
        after = _list_algorithms(library, _nearby_problems(shape, bias_after=True), device.index)
        for algorithm in after[:_BIAS_AFTER] if in_epilogue else after:
            yield solution_of(library, SolutionName(algorithm, bias_after=True))


def refine(library: Library, solution: Solution, shape: Shape, device: Device) -> Iterator[Solution]:
    """List the neighbours of a cuBLASLt configuration; none for other solutions."""
    try:
        name = parse_name(solution.kernel_name, solution.split_k)
    except PluginError:
        return
    if not isinstance(name.algorithm, KernelConfig) or not library.abi.config:
        return
    problem = make_problem(shape, bias_after=name.bias_after, fast_accum=name.fast_accum)
    with locked_descriptors(library, problem, device.index) as descriptors:
        neighbours = list(enumerate_neighbours(descriptors, name.algorithm, library.abi.workspace))
    for config, _ in neighbours:
        yield solution_of(library, attrs.evolve(name, algorithm=config))


def allows_fast_accum(library: Library, shape: Shape, device: Device) -> bool:
    """Return whether the device may sum the shape's fp8 products in a shorter accumulator."""
    fp8 = dtype_bits(shape.dtype) == 8 and shape.dtype != "int8"
    available = "fast_accum" in library.abi.desc and device.gfx in _FAST_GFX
    return available and fp8 and shape.outdtype in _FAST_OUTPUTS and shape.scale != "block" and not shape.op.startswith("batched_")


def solution_of(library: Library, name: SolutionName) -> Solution:
    """Return the solution of a name, with an algorithm's index as its hint."""
    split_k = name.algorithm.split_k if isinstance(name.algorithm, KernelConfig) else 0
    index = name.algorithm.index if isinstance(name.algorithm, AlgorithmIndex) else 0
    return Solution(library.abi.libtype, str(name), split_k=split_k, solidx=index)


def _nearby_problems(shape: Shape, **how: bool) -> list[Problem]:
    """Return the problems of M, M / 2, 2 M and 4 M rows, whose algorithms may suit the shape."""
    rows = dict.fromkeys((shape.m, shape.m // 2, 2 * shape.m, 4 * shape.m))
    return [make_problem(attrs.evolve(shape, m=m), **how) for m in rows if m == shape.m or 0 < m <= _MAX_ROWS]


def _list_algorithms(library: Library, problems: Sequence[Problem], index: int) -> list[KernelConfig | AlgorithmIndex | None]:
    """Return the algorithms of the first problem, best first, then the others' that fit it.

    None stands for the library's first answer where no name reproduces it.
    """
    problem, *others = problems
    if not library.abi.config:
        build = library_build(library, index)
        return [AlgorithmIndex(number, *build) for number in results_by_index(library, problem, index, ALL_RESULTS)]
    limit = library.abi.workspace
    with locked_descriptors(library, problem, index) as descriptors:
        # Without a workspace it lists kernels that it otherwise ranks behind those that split K.
        results = [*descriptors.heuristic_results(TOP_RESULTS, limit), *descriptors.heuristic_results(TOP_RESULTS, 0)]
        for other in others if results else ():
            results += ProblemDescriptors(library, other, index).heuristic_results(TOP_RESULTS, limit)
        configs = dict.fromkeys(descriptors.read_config(result.algo) for result in results)
        # A name keeps the attributes of an answer alone, so each is checked without the rest.
        checked = {config: descriptors.check(config) for config in configs}
        accepted = [config for config, answer in checked.items() if isinstance(answer, HeuristicResult) and answer.workspace <= limit]
        lossy = bool(results) and descriptors.init_algo(next(iter(configs))) != results[0].algo
    return [*((None,) if lossy else ()), *accepted]


def enumerate_neighbours(
    descriptors: ProblemDescriptors, config: KernelConfig, workspace: int
) -> Iterator[tuple[KernelConfig, HeuristicResult]]:
    """List accepted configurations one step away, within *workspace* bytes and with full waves."""
    start, sizes = descriptors.check(config), descriptors.problem.sizes
    idle = idle_share(start.waves) if isinstance(start, HeuristicResult) else 1.0
    able = _limit_tiles_to_scales(descriptors.capabilities(config.id), descriptors.problem)
    accepted: dict[KernelConfig, HeuristicResult] = {}
    for changed in enumerate_changes(config, able, sizes):
        candidate, result = _check_with_other_stages(descriptors, changed, able if changed.tile != config.tile else None)
        fits = isinstance(result, HeuristicResult) and result.workspace <= workspace
        if fits and idle_share(result.waves) <= idle + _IDLE_INCREASE:
            accepted[candidate] = result
    by_tile = [candidate for candidate in accepted if candidate.tile != config.tile]
    by_tile.sort(
        key=lambda other: (
            _DISTANCE_WEIGHT * _tile_distance(other.tile, config.tile) + _wasted_octaves(other.tile, accepted[other].waves, sizes)
        )
    )
    dropped = set(by_tile[_TILES_TRIED:])
    yield from ((candidate, result) for candidate, result in accepted.items() if candidate not in dropped)


def enumerate_changes(config: KernelConfig, able: Capabilities, sizes: tuple[int, int, int]) -> Iterable[KernelConfig]:
    """List configurations with one attribute changed, without repeats or calls of the library.

    Args:
        config: the starting point.
        able: the attribute values that the algorithm accepts.
        sizes: rows of D, columns of D, and K.
    """
    change = functools.partial(attrs.evolve, config)
    changed = [change(tile=tile) for tile in nearest_tiles(config.tile, able.tiles, sizes, _TILES_CHECKED)]
    changed += [change(stages=stages) for stages in able.stages]
    changed += [change(cluster=number) for number, (rows, columns) in clusters().items() if rows * columns <= _CLUSTER_SIZE]
    changed += list(_enumerate_splits(config, able, sizes[2]))
    changed += [change(swizzle=swizzle) for swizzle in range(able.swizzles + 1)]
    changed += [change(option=option) for option in nearest_options(config.option, able.options)]
    return [other for other in dict.fromkeys(changed) if other != config]


def nearest_tiles(tile: int, possible: Iterable[int], sizes: tuple[int, int, int], most: int = _TILES_TRIED) -> list[int]:
    """Return the tile, if possible, and the *most* tiles of nearest sides.

    Tiles with a longer side that the output would leave half empty are left out.
    """
    known = tiles()
    if tile not in known:
        return list(possible)[:most]
    rows, columns = known[tile]

    def is_near(number: int) -> bool:
        sides = zip(known[number], (rows, columns), sizes[:2], strict=True)
        return all(
            before / _SIDE_RATIO <= side <= before * _SIDE_RATIO and (side <= before or side < 2 * size) for side, before, size in sides
        )

    near = [number for number in possible if number in known and is_near(number)]
    return sorted(near, key=lambda number: _tile_distance(number, tile))[: most + 1]


def nearest_options(option: int, largest: int) -> list[int]:
    """Return the custom options to try: all of few, else 0 and those a power of two away."""
    if largest <= _ALL_OPTIONS:
        return list(range(largest + 1))
    steps = (1, 2, 4, 8, 16)
    near = [option + sign * step for step in steps for sign in (-1, 1)]
    return [0, *(value for value in near if 0 < value <= largest)]


def idle_share(waves: float) -> float:
    """Return the share of the device's time that the last wave leaves idle; 0 for unknown waves."""
    return 1 - waves / math.ceil(waves) if waves > 0 else 0.0


def _limit_tiles_to_scales(able: Capabilities, problem: Problem) -> Capabilities:
    """Drop tiles with more rows than share a scale of the weight.

    cuBLASLt accepts them and scales all rows alike: 30 of 30 with 256 rows were wrong on an
    H200 (CUDA 13.0).
    """
    if problem.a_scale != "square":
        return able
    known = tiles()
    return attrs.evolve(able, tiles=tuple(tile for tile in able.tiles if tile not in known or known[tile][0] <= BLOCK))


def _check_with_other_stages(
    descriptors: ProblemDescriptors, config: KernelConfig, able: Capabilities | None
) -> tuple[KernelConfig, HeuristicResult | str]:
    """Check a configuration; if it is refused and *able* is given, try the nearest other stages.

    A larger tile with as many stages may exceed the shared memory.
    """
    answer = descriptors.check(config)
    if isinstance(answer, HeuristicResult) or able is None or config.stages not in able.stages:
        return config, answer
    position = able.stages.index(config.stages)
    for stages in sorted(able.stages, key=lambda other: abs(able.stages.index(other) - position))[1 : _OTHER_STAGES + 1]:
        other = attrs.evolve(config, stages=stages)
        if isinstance(other_answer := descriptors.check(other), HeuristicResult):
            return other, other_answer
    return config, answer


def _enumerate_splits(config: KernelConfig, able: Capabilities, k: int) -> Iterator[KernelConfig]:
    """List other splits of K with each possible reduction; no split needs none."""
    if not able.split_k:
        return
    split = config.split_k
    for split_k in dict.fromkeys((1, split - 1, split, split + 1, 2 * split, split // 2, 3 * split)):
        if split_k == 1:
            yield attrs.evolve(config, split_k=1, reduction=0)
        elif 1 < split_k <= min(_MAX_SPLIT, k // _MIN_PART):
            for reduction in (1, 2, 4):
                if able.reductions & reduction:
                    yield attrs.evolve(config, split_k=split_k, reduction=reduction)


def _tile_distance(tile: int, other: int) -> float:
    """Return the octaves between the sides of two tiles, summed; 0 for unknown sides."""
    known = tiles()
    if tile not in known or other not in known:
        return 0.0
    return sum(abs(math.log2(mine / yours)) for mine, yours in zip(known[tile], known[other], strict=True))


def _wasted_octaves(tile: int, waves: float, sizes: tuple[int, int, int]) -> float:
    """Return the octaves of time lost to the last wave and to tiles beyond the edges of D."""
    sides = zip(sizes[:2], tiles().get(tile, sizes[:2]), strict=True)
    return math.log2(math.prod(math.ceil(size / side) * side / size for size, side in sides)) - math.log2(1 - idle_share(waves))
