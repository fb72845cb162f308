"""Solutions: which kernels are worth timing for a shape, best guesses first, and their neighbours."""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import attrs
from tunedgemm.plugin import Device, PluginError, Shape, Solution

from tunedgemm_skinny.cost import cost_of
from tunedgemm_skinny.fit import ceil_div, per_split, refusal, registers, span_of, threads_of
from tunedgemm_skinny.limits import ARCHITECTURES, batches_of, depth_of, supports
from tunedgemm_skinny.names import FAMILIES, Kernel, kernel_of

#: Most solutions of one shape.
MOST = 60

SPLITS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)

Chosen = tuple[Kernel, int]

#: The coarse grid from which `choices` climbs; where a parameter is not named, all of its values.
_LISTED: dict[str, dict[str, tuple[int, ...]]] = {
    "rows": {"n_each": (1, 2, 4), "warps_n": (1, 4), "warps_k": (1, 4), "unroll": (1, 2), "stages": (0, 3)},
    "tiles": {"n_each": (1, 2), "warps_n": (1, 4), "warps_k": (1, 4), "unroll": (1, 4), "stages": (0, 3)},
    "wgmma": {"n_each": (1,), "warps_n": (1, 2), "warps_k": (1, 2), "unroll": (1, 2), "stages": (4, 8)},
}
#: Warps of a block at most; and of all blocks for each multiprocessor: no split is listed with fewer than the first unless K can be cut
#: no further, no more parts than bring the second. What was quick on an H200 had so many.
_WARPS = 16
_RESIDENT = {"rows": (8, 32), "tiles": (3, 12), "wgmma": (3, 8)}
#: K below which no split may be worth its while.
_SHORT = 2048
#: How many of a family are climbed from, and how often.
_CLIMBERS, _CLIMBS = 8, 2
#: How much longer, as a logarithm, each further kernel of one way to load counts as: guesses err by more, and by as much for all of a way.
_FURTHER = 0.01
#: Solutions of each family at least.
_LEAST = 6


def choices(shape: Shape, device: Device) -> Iterator[tuple[Kernel, int]]:
    """Kernels with numbers of splits, each once, at most `MOST`, all of which fit; best guesses first, as `spread` has them."""
    if not supports(shape, device):
        return
    costs: dict[Chosen, float] = {}
    for family in FAMILIES:
        costs |= _climbed(family, shape, device)
    ordered = spread(costs)
    kept = {chosen for family in FAMILIES for chosen in [each for each in ordered if isinstance(each[0], family)][:_LEAST]}
    kept.update(itertools.islice((chosen for chosen in ordered if chosen not in kept), MOST - len(kept)))
    yield from (chosen for chosen in ordered if chosen in kept)


def spread(costs: Mapping[Chosen, float]) -> list[Chosen]:
    """Chosen kernels in the order of their costs, each further one of a way to load a little later."""
    seen: Counter[tuple[object, ...]] = Counter()
    later: list[tuple[float, int, Chosen]] = []
    for chosen in sorted(costs, key=lambda chosen: (costs[chosen], chosen[0].name, chosen[1])):
        kernel = chosen[0]
        way = (kernel.family, kernel.n_each, kernel.x_shared, kernel.stages > 0, kernel.cluster)
        later.append((costs[chosen] + _FURTHER * seen[way], len(later), chosen))
        seen[way] += 1
    return [chosen for *_, chosen in sorted(later, key=operator.itemgetter(0, 1))]


def enumerate_solutions(libtype: str, shape: Shape, device: Device) -> Iterator[Solution]:
    """The solutions of a shape, best guesses first."""
    for kernel, splits in choices(shape, device):
        yield solution_of(libtype, kernel, splits)


def refine(solution: Solution, shape: Shape, device: Device) -> Iterator[Solution]:
    """The neighbours of a solution: one parameter, or splitK, moved one step of its ladder."""
    try:
        kernel = kernel_of(solution.kernel_name)
    except PluginError:
        return
    if not supports(shape, device):
        return
    for changed, parts in _near(kernel, solution.split_k or 1):
        if fits(changed, parts, shape, device):
            yield solution_of(solution.libtype, changed, parts)


@functools.lru_cache(maxsize=4096)
def _near(kernel: Kernel, splits: int) -> tuple[Chosen, ...]:
    """One parameter, or splitK, moved one step of its ladder; and, as one step, from no split to a cluster of two."""
    near: list[Chosen] = [(kernel, other) for other in _beside(SPLITS, splits)]
    for field in attrs.fields(type(kernel)):
        for step in _beside(field.metadata["ladder"], getattr(kernel, field.name)):
            with contextlib.suppress(PluginError):  # more warps than a block has
                near.append((attrs.evolve(kernel, **{field.name: step}), 2 if field.name == "cluster" and splits == 1 else splits))
    return tuple(near)


def fits(kernel: Kernel, splits: int, shape: Shape, device: Device) -> bool:
    """Whether a kernel is possible, fits the registers, and leaves no warp without work."""
    if refusal(kernel, splits, shape, device.gfx):
        return False
    architecture, span = ARCHITECTURES[device.gfx], span_of(kernel, shape, device.gfx)
    share = per_split(kernel, splits, shape, device.gfx)
    works = (kernel.warps_k - 1) * span < share and (kernel.warps_n - 1) * kernel.each < shape.n and (kernel.unroll == 1 or span <= share)
    most = min(architecture.registers, architecture.register_file // threads_of(kernel, device.gfx))
    return works and registers(kernel, shape, device.gfx) <= most


def solution_of(libtype: str, kernel: Kernel, splits: int) -> Solution:
    """The solution of a kernel; its sums are added in one order, whatever M."""
    return Solution(libtype, kernel.name, splits if splits > 1 else 0, batch_invariant=True)


def _beside(ladder: tuple[int, ...], value: int) -> list[int]:
    below, above = [step for step in ladder if step < value], [step for step in ladder if step > value]
    return below[-1:] + above[:1]


def _climbed(family: type[Kernel], shape: Shape, device: Device) -> dict[Chosen, float]:
    """The costs of what fits: of a coarse grid, and of the neighbours of its best, and of the best of those."""
    costs: dict[Chosen, float] = {}
    tried: set[Chosen] = set()

    def try_all(some: Iterable[Chosen]) -> None:
        for chosen in some:
            if chosen not in tried and chosen[0].warps <= _WARPS:
                tried.add(chosen)
                if fits(*chosen, shape, device):
                    costs[chosen] = cost_of(*chosen, shape, device)

    try_all(_coarse(family, shape, device))
    if not costs:  # a product so small that none of its usual parts has work for all warps
        try_all((kernel, 1) for kernel, *_ in _grid(family))
    from_here: set[Chosen] = set()
    for _ in range(_CLIMBS):
        best = heapq.nsmallest(_CLIMBERS, ((cost, chosen[0].name, chosen[1], chosen) for chosen, cost in costs.items()))
        fresh = [chosen for *_, chosen in best if chosen not in from_here]
        from_here.update(fresh)
        try_all(each for chosen in fresh for each in _near(*chosen))
    return costs


def _coarse(family: type[Kernel], shape: Shape, device: Device) -> Iterator[Chosen]:
    """The grid of a family, with the numbers of splits that give a multiprocessor its usual warps, and half of them."""
    least, usual = _RESIDENT[family.family]
    columns = batches_of(shape) / max(device.cu_num, 1)
    clusters = ARCHITECTURES[device.gfx].cluster
    for kernel, per_block, warps in _grid(family):
        if kernel.stages and device.gfx.startswith("gfx"):
            continue
        whole = columns * ceil_div(shape.n, per_block) * warps
        if whole >= least or depth_of(shape) < _SHORT:
            yield kernel, 1
        parts = max((splits for splits in SPLITS[1:] if whole * splits <= usual), default=0)
        for splits in (parts, parts // 2) if parts > 3 else (parts,) * (parts > 1):
            yield (attrs.evolve(kernel, cluster=True) if splits <= clusters else kernel), splits


@functools.cache
def _grid(family: type[Kernel]) -> tuple[tuple[Kernel, int, int], ...]:
    """The kernels of the coarse grid, each with the rows of the weight and the warps that a block has."""
    listed = _LISTED[family.family]
    fields = [field for field in attrs.fields(family) if field.name != "cluster"]
    found = []
    for values in itertools.product(*(listed.get(field.name, field.metadata["ladder"]) for field in fields)):
        parameters = dict(zip((field.name for field in fields), values, strict=True))
        if parameters["warps_n"] * parameters["warps_k"] <= _WARPS:
            kernel = family(**parameters)
            found.append((kernel, kernel.per_block, kernel.warps))
    return tuple(found)
