"""List the kernels worth timing for a shape by predicted cost, and the neighbours of one."""

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
from tunedgemm.tools.launching import ARCHITECTURES, sum_order

from tunedgemm_skinny.cost import cost_of
from tunedgemm_skinny.limits import batches_of, depth_of, weight_of
from tunedgemm_skinny.names import FAMILIES, KernelConfig, Packed, Wgmma, parse_name
from tunedgemm_skinny.resources import ceil_div, per_split, registers, span_of, threads_of, unfit

#: Most solutions of a shape.
MOST = 60

SPLITS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)

#: A kernel and its number of splits of K.
Candidate = tuple[KernelConfig, int]

#: Coarse grid where the search starts; a parameter that is not listed takes all of its values.
_LISTED: dict[str, dict[str, tuple[int, ...]]] = {
    "rows": {"n_each": (1, 2, 4), "warps_n": (1, 4), "warps_k": (1, 4), "unroll": (1, 2), "stages": (0, 3)},
    "tiles": {"n_each": (1, 2), "warps_n": (1, 4), "warps_k": (1, 4), "unroll": (1, 4), "stages": (0, 3)},
    "wgmma": {"n_each": (1,), "warps_n": (1, 2), "warps_k": (1, 2), "unroll": (1, 2), "stages": (4, 8)},
    "packed": {"warps_n": (1, 2, 4), "warps_k": (1, 2, 4, 8), "unroll": (1, 2)},
}
#: Most warps of a block.
_WARPS = 16
#: Least and usual warps per multiprocessor, over all blocks; fast kernels on an H200 had so many. A
#: kernel with fewer than the least is split further, until K is too short. Splits stop at the
#: usual.
_RESIDENT = {"rows": (8, 32), "tiles": (3, 12), "wgmma": (3, 8), "packed": (8, 32)}
#: K below which kernels without splits are always tried.
_SHORT = 2048
#: Best kernels of a family whose neighbours are tried, and rounds of that.
_CLIMBERS, _CLIMBS = 8, 2
#: Penalty, in the logarithm of the time, on each further kernel with the same way to load.
#: Predictions err by more than that, and alike for all kernels of a way.
_FURTHER = 0.01
#: Least solutions of each family.
_LEAST = 6
#: wgmma instructions along K of a step.
_DEEP = 4


def enumerate_kernels(shape: Shape, device: Device) -> Iterator[Candidate]:
    """Yield at most `MOST` kernels that fit, with splits, in the order of `spread`."""
    costs: dict[Candidate, float] = {}
    for family in FAMILIES:
        costs |= _search(family, shape, device)
    ordered = spread(costs)
    kept = {candidate for family in FAMILIES for candidate in [other for other in ordered if isinstance(other[0], family)][:_LEAST]}
    kept.update(itertools.islice((candidate for candidate in ordered if candidate not in kept), MOST - len(kept)))
    yield from (candidate for candidate in ordered if candidate in kept)


def spread(costs: Mapping[Candidate, float]) -> list[Candidate]:
    """Sort kernels by cost, with a penalty on each further one that loads in the same way."""
    seen: Counter[tuple[object, ...]] = Counter()
    penalised: list[tuple[float, int, Candidate]] = []
    for candidate in sorted(costs, key=lambda candidate: (costs[candidate], candidate[0].name, candidate[1])):
        kernel = candidate[0]
        way = (kernel.family, kernel.n_each, kernel.x_shared, kernel.stages > 0, kernel.cluster)
        penalised.append((costs[candidate] + _FURTHER * seen[way], len(penalised), candidate))
        seen[way] += 1
    return [candidate for *_, candidate in sorted(penalised, key=operator.itemgetter(0, 1))]


def enumerate_solutions(libtype: str, shape: Shape, device: Device) -> Iterator[Solution]:
    """Yield the solutions of a shape, in the order of `enumerate_kernels`."""
    for kernel, splits in enumerate_kernels(shape, device):
        yield solution_of(libtype, kernel, splits, shape, device)


def refine(solution: Solution, shape: Shape, device: Device) -> Iterator[Solution]:
    """Yield the solutions one step of one parameter, or of splitK, away."""
    try:
        kernel = parse_name(solution.kernel_name)
    except PluginError:
        return
    for neighbour, splits in _neighbours(kernel, solution.split_k or 1):
        if is_useful(neighbour, splits, shape, device):
            yield solution_of(solution.libtype, neighbour, splits, shape, device)


@functools.lru_cache(maxsize=4096)
def _neighbours(kernel: KernelConfig, splits: int) -> tuple[Candidate, ...]:
    """Move one parameter, or the splits, one step of its ladder.

    A cluster of two is one step from no split.
    """
    near: list[Candidate] = [(kernel, other) for other in _adjacent(SPLITS, splits)]
    for field in attrs.fields(type(kernel)):
        for step in _adjacent(field.metadata["ladder"], getattr(kernel, field.name)):
            with contextlib.suppress(PluginError):  # too many warps
                near.append((attrs.evolve(kernel, **{field.name: step}), 2 if field.name == "cluster" and splits == 1 else splits))
    return tuple(near)


def is_useful(kernel: KernelConfig, splits: int, shape: Shape, device: Device) -> bool:
    """Check that a kernel fits the device, its registers included, and leaves no warp idle."""
    if unfit(kernel, splits, shape, device.gfx):
        return False
    architecture, span = ARCHITECTURES[device.gfx], span_of(kernel, shape, device.gfx)
    share = per_split(kernel, splits, shape, device.gfx)
    all_work = (
        (kernel.warps_k - 1) * span < share
        and (kernel.warps_n - 1) * kernel.rows_per_warp < shape.n
        and (kernel.unroll == 1 or span <= share)
    )
    # AMD's instructions address 256 vector registers; CDNA's others accumulate.
    most = min(architecture.registers, 256, (architecture.file_ki << 10) // threads_of(kernel, device.gfx))
    return all_work and registers(kernel, shape, device.gfx) <= most


def solution_of(libtype: str, kernel: KernelConfig, splits: int, shape: Shape, device: Device) -> Solution:
    """Return the solution of a kernel. Its order of sums does not depend on M."""
    order = order_of(kernel, splits, shape, device.gfx)
    return Solution(libtype, kernel.name, splits if splits > 1 else 0, batch_invariant=True, sum_order=order)


def order_of(kernel: KernelConfig, splits: int, shape: Shape, gfx: str) -> str:
    """Return the name of the kernel's order of sums.

    Warps along K take spans in turn, so only one group of wgmma warps has the order of other
    backends. Lanes, warps and splits meet in a fixed order whatever the rows of a warp. The last
    scale and the bias are one fused multiply-add. mxfp4 and `packed` have no name.
    """
    if weight_of(shape) == "fp4x2" or isinstance(kernel, Packed):
        return ""
    part = per_split(kernel, splits, shape, gfx)
    if isinstance(kernel, Wgmma) and kernel.warps_k == 1:
        step = span_of(kernel, shape, gfx) // kernel.unroll
        promoted = step if shape.dtype.startswith("fp8") else 0
        return sum_order(shape, f"wgmma-k{step // _DEEP}", promoted=promoted, part=part, fused=True)
    ring = "a" if kernel.stages else ""
    return sum_order(shape, f"{kernel.family}-x{kernel.warps_k}u{kernel.unroll}{ring}", part=part, fused=True)


def _adjacent(ladder: tuple[int, ...], value: int) -> list[int]:
    """Return the steps of a ladder directly below and above a value."""
    below, above = [step for step in ladder if step < value], [step for step in ladder if step > value]
    return below[-1:] + above[:1]


def _search(family: type[KernelConfig], shape: Shape, device: Device) -> dict[Candidate, float]:
    """Return the costs of the coarse grid and, twice, of the best kernels' neighbours."""
    costs: dict[Candidate, float] = {}
    tried: set[Candidate] = set()

    def try_all(candidates: Iterable[Candidate]) -> None:
        for candidate in candidates:
            if candidate not in tried and candidate[0].warps <= _WARPS:
                tried.add(candidate)
                if is_useful(*candidate, shape, device):
                    costs[candidate] = cost_of(*candidate, shape, device)

    try_all(_coarse(family, shape, device))
    if not costs:  # too small a product for the usual splits: some warp would idle
        try_all((kernel, 1) for kernel, *_ in _grid(family))
    expanded: set[Candidate] = set()
    for _ in range(_CLIMBS):
        best = heapq.nsmallest(_CLIMBERS, ((cost, candidate[0].name, candidate[1], candidate) for candidate, cost in costs.items()))
        fresh = [candidate for *_, candidate in best if candidate not in expanded]
        expanded.update(fresh)
        try_all(neighbour for candidate in fresh for neighbour in _neighbours(*candidate))
    return costs


def _coarse(family: type[KernelConfig], shape: Shape, device: Device) -> Iterator[Candidate]:
    """Yield the coarse grid of a family, with splits for the usual warps and for half."""
    least, usual = _RESIDENT[family.family]
    columns = batches_of(shape) / max(device.cu_num, 1)
    clusters = ARCHITECTURES[device.gfx].cluster
    for kernel, per_block, warps in _grid(family):
        if kernel.stages and device.gfx.startswith("gfx"):
            continue
        whole = columns * ceil_div(shape.n, per_block) * warps
        if whole >= least or depth_of(shape) < _SHORT:
            yield kernel, 1
        most = max((splits for splits in SPLITS[1:] if whole * splits <= usual), default=0)
        for splits in (most, most // 2) if most > 3 else (most,) * (most > 1):
            yield (attrs.evolve(kernel, cluster=True) if splits <= clusters else kernel), splits


@functools.cache
def _grid(family: type[KernelConfig]) -> tuple[tuple[KernelConfig, int, int], ...]:
    """Return the kernels of the coarse grid, each with the weight rows and the warps of a block."""
    listed = _LISTED[family.family]
    fields = [field for field in attrs.fields(family) if field.name != "cluster"]
    kernels = []
    for values in itertools.product(*(listed.get(field.name, field.metadata["ladder"]) for field in fields)):
        parameters = dict(zip((field.name for field in fields), values, strict=True))
        if parameters["warps_n"] * parameters["warps_k"] <= _WARPS:
            kernel = family(**parameters)
            kernels.append((kernel, kernel.per_block, kernel.warps))
    return tuple(kernels)
