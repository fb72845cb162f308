"""List the instances worth timing for a shape, best guesses first, and their neighbours."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator

import attrs
from tunedgemm.plugin import Device, PluginError, Shape

from tunedgemm_ck.cutlass.cost import ceil_div, cost_of, tiles_of, units_of
from tunedgemm_ck.cutlass.kernels import KERNELS, SM80, SM100, SM120
from tunedgemm_ck.cutlass.limits import BLOCK, LEAST_STEPS, MAX_SPLITS, depths_of, may_be_fast, unfit
from tunedgemm_ck.cutlass.names import CLUSTERS, SCHEDULERS, SCHEDULES, STAGES, TILES_K, TILES_M, TILES_N, WARPS, CutlassInstance
from tunedgemm_ck.cutlass.resources import accumulators_of, width_of

Candidate = tuple[CutlassInstance, int]

SPLITS = (0, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)

#: (tile_m, tile_n, bytes of tile_k, cluster, schedule, scheduler, swap) of sm_90: large tiles for
#: many rows, then swapped ones for few.
_Row = tuple[int, int, int, tuple[int, int], str, str, bool]
_HOPPER: tuple[_Row, ...] = (
    (128, 256, 128, (2, 1), "cooperative", "persistent", False),
    (256, 128, 128, (2, 1), "cooperative", "persistent", False),
    (128, 224, 128, (2, 1), "cooperative", "persistent", False),
    (128, 192, 128, (2, 1), "cooperative", "persistent", False),
    (128, 160, 128, (1, 1), "cooperative", "persistent", False),
    (128, 160, 128, (1, 2), "cooperative", "persistent", False),
    (128, 256, 128, (2, 1), "cooperative", "streamk", False),
    (128, 160, 128, (1, 1), "cooperative", "streamk", False),
    (128, 128, 128, (1, 1), "cooperative", "streamk", False),
    (128, 128, 128, (2, 1), "pingpong", "persistent", False),
    (64, 160, 128, (1, 1), "plain", "single", False),
    (64, 128, 128, (1, 1), "plain", "single", False),
    (128, 128, 128, (1, 2), "pingpong", "persistent", True),
    (64, 256, 128, (1, 1), "pingpong", "persistent", True),
    (64, 256, 128, (1, 2), "pingpong", "persistent", True),
    (128, 128, 128, (1, 1), "cooperative", "streamk", True),
    (64, 16, 256, (1, 1), "pingpong", "persistent", True),
    (64, 32, 256, (1, 1), "pingpong", "persistent", True),
    (64, 64, 256, (1, 1), "pingpong", "persistent", True),
    (128, 16, 128, (1, 1), "cooperative", "streamk", True),
    (128, 16, 256, (1, 1), "cooperative", "streamk", True),
    (128, 32, 128, (1, 1), "cooperative", "streamk", True),
    (128, 64, 128, (1, 1), "cooperative", "streamk", True),
    (64, 128, 128, (1, 1), "pingpong", "persistent", True),
)
#: The same for fp8, whose sums take twice the registers.
_FP8: tuple[_Row, ...] = (
    (128, 128, 128, (2, 1), "cooperative", "persistent", False),
    (128, 128, 128, (1, 2), "cooperative", "persistent", False),
    (128, 128, 128, (1, 1), "cooperative", "persistent", False),
    (128, 128, 128, (2, 1), "cooperative", "streamk", False),
    (128, 128, 128, (1, 1), "cooperative", "streamk", False),
    (256, 64, 128, (1, 2), "cooperative", "persistent", False),
    (64, 128, 128, (2, 1), "pingpong", "persistent", False),
    (64, 128, 128, (1, 1), "pingpong", "persistent", False),
    (128, 64, 128, (1, 2), "pingpong", "persistent", False),
    (64, 128, 128, (1, 1), "plain", "single", False),
    (128, 128, 128, (1, 2), "cooperative", "persistent", True),
    (128, 128, 128, (1, 1), "cooperative", "streamk", True),
    (256, 64, 128, (1, 1), "cooperative", "persistent", True),
    (256, 32, 128, (1, 1), "cooperative", "streamk", True),
    (64, 16, 128, (1, 1), "plain", "single", True),
    (64, 16, 128, (1, 1), "pingpong", "persistent", True),
    (64, 32, 128, (1, 1), "pingpong", "persistent", True),
    (64, 64, 128, (1, 1), "pingpong", "persistent", True),
    (128, 16, 128, (1, 1), "cooperative", "streamk", True),
    (128, 32, 128, (1, 1), "cooperative", "streamk", True),
    (128, 64, 128, (1, 1), "cooperative", "streamk", True),
    (64, 128, 128, (1, 1), "pingpong", "persistent", True),
    (128, 64, 128, (2, 1), "pingpong", "persistent", True),
    (128, 64, 128, (1, 1), "cooperative", "persistent", True),
)
#: Exact instances listed with fast ones: small tiles, which are memory-bound, and a few large ones.
_EXACT = tuple(
    row
    for row in _FP8
    if row[-1] or row in ((128, 128, 128, (1, 1), "cooperative", "streamk", False), (128, 64, 128, (1, 2), "pingpong", "persistent", False))
)
#: The same for fp8 whose sums stay in the tensor core, with the registers of 16-bit operands.
_FAST: tuple[_Row, ...] = (
    (128, 256, 128, (2, 1), "cooperative", "persistent", False),
    (128, 224, 128, (2, 1), "cooperative", "persistent", False),
    (128, 192, 128, (2, 1), "cooperative", "persistent", False),
    (128, 160, 128, (1, 1), "cooperative", "persistent", False),
    (128, 256, 128, (2, 1), "cooperative", "streamk", False),
    (128, 128, 128, (2, 1), "pingpong", "persistent", False),
    (128, 128, 128, (1, 1), "cooperative", "streamk", False),
    (64, 256, 128, (1, 2), "pingpong", "persistent", True),
)
#: The same with block scales, which need 128 of K and 128 rows of the weight.
_BLOCKS: tuple[_Row, ...] = (
    (128, 128, 128, (1, 1), "cooperative", "persistent", False),
    (128, 128, 128, (2, 1), "cooperative", "persistent", False),
    (128, 128, 128, (1, 2), "cooperative", "persistent", False),
    (128, 128, 128, (1, 1), "cooperative", "streamk", False),
    (128, 128, 128, (2, 1), "cooperative", "streamk", False),
    (64, 128, 128, (1, 1), "pingpong", "persistent", False),
    (64, 128, 128, (2, 1), "pingpong", "persistent", False),
    (64, 128, 128, (1, 2), "pingpong", "persistent", False),
    (128, 128, 128, (1, 2), "cooperative", "persistent", True),
    (128, 128, 128, (1, 1), "cooperative", "persistent", True),
    (128, 128, 128, (1, 1), "cooperative", "streamk", True),
    (128, 64, 128, (2, 1), "pingpong", "persistent", True),
    *(
        (128, n, 128, (1, 1), schedule, scheduler, True)
        for n in (16, 32, 64)
        for schedule, scheduler in (("pingpong", "persistent"), ("cooperative", "persistent"), ("cooperative", "streamk"))
    ),
)
#: Of sm_100: tiles of two blocks, then of one, then swapped ones for few rows. To add parts of K,
#: stream-K loads a tile into registers, which holds 64 columns without spilling.
_TENSOR_MEMORY: tuple[_Row, ...] = (
    (128, 256, 128, (2, 1), "2sm", "persistent", False),
    (128, 192, 128, (2, 1), "2sm", "persistent", False),
    (128, 128, 128, (2, 1), "2sm", "persistent", False),
    (128, 64, 128, (2, 1), "2sm", "streamk", False),
    (128, 256, 128, (1, 1), "1sm", "persistent", False),
    (128, 128, 128, (1, 1), "1sm", "persistent", False),
    (64, 128, 128, (1, 1), "1sm", "persistent", False),
    (128, 64, 128, (1, 1), "1sm", "persistent", False),
    (128, 64, 128, (1, 1), "1sm", "streamk", False),
    (128, 128, 128, (2, 1), "2sm", "persistent", True),
    (128, 64, 128, (2, 1), "2sm", "persistent", True),
    (128, 64, 128, (1, 1), "1sm", "streamk", True),
    (128, 32, 128, (1, 1), "1sm", "streamk", True),
    (128, 16, 256, (1, 1), "1sm", "streamk", True),
    (64, 64, 256, (1, 1), "1sm", "persistent", True),
    (64, 32, 256, (1, 1), "1sm", "persistent", True),
    (64, 16, 256, (1, 1), "1sm", "persistent", True),
)
#: The same with block scales, whose sums are added in registers.
_TENSOR_MEMORY_BLOCKS: tuple[_Row, ...] = (
    (128, 128, 128, (2, 1), "2sm", "persistent", False),
    (128, 128, 128, (1, 1), "1sm", "persistent", False),
    (64, 128, 128, (1, 1), "1sm", "persistent", False),
    (128, 128, 128, (2, 1), "2sm", "persistent", True),
    (128, 64, 128, (2, 1), "2sm", "persistent", True),
    *((128, n, 128, (1, 1), "1sm", scheduler, True) for n in (16, 32, 64) for scheduler in ("persistent", "streamk")),
)
#: Of fp8 on sm_120, where instances of ping-pong spill.
_GEFORCE: tuple[_Row, ...] = (
    (128, 128, 128, (1, 1), "cooperative", "persistent", False),
    (128, 64, 128, (1, 1), "cooperative", "persistent", False),
    *((128, n, 128, (1, 1), "cooperative", scheduler, True) for n in (32, 64) for scheduler in ("persistent", "streamk")),
)
#: The same with block scales.
_GEFORCE_BLOCKS: tuple[_Row, ...] = (
    (128, 128, 128, (1, 1), "cooperative", "persistent", False),
    (128, 128, 128, (1, 1), "cooperative", "streamk", False),
    (64, 128, 128, (1, 1), "pingpong", "persistent", False),
    *((128, n, 128, (1, 1), "cooperative", scheduler, True) for n in (32, 64) for scheduler in ("persistent", "streamk")),
    (128, 32, 128, (1, 1), "pingpong", "persistent", True),
)
#: Kernels whose rows are the same for all operands -> those without and with block scales.
_BLACKWELL = {SM100: (_TENSOR_MEMORY, _TENSOR_MEMORY_BLOCKS), SM120: (_GEFORCE, _GEFORCE_BLOCKS)}
#: (tile_m, tile_n, tile_k in bytes, warps, stages) of sm_80.
_MULTISTAGE: tuple[tuple[int, int, int, tuple[int, int], int], ...] = (
    (128, 256, 64, (2, 4), 3),
    (256, 128, 64, (4, 2), 3),
    (128, 128, 64, (2, 2), 4),
    (128, 128, 64, (2, 2), 3),
    (128, 128, 64, (2, 4), 4),
    (128, 64, 64, (2, 2), 4),
    (64, 128, 64, (2, 2), 4),
    (64, 64, 64, (2, 2), 5),
    (64, 64, 128, (2, 2), 4),
    (64, 64, 128, (2, 2), 3),
    (128, 128, 128, (2, 2), 3),
)
#: Multiple of the best predicted cost up to which instances are listed; `_LEAST` are listed at any
#: cost.
WORSE, _LEAST = 3.0, 6


@functools.cache
def listed_instances(gfx: str, dtype: str, blocks: bool, full: bool, fast: bool = False) -> tuple[CutlassInstance, ...]:
    """Return the instances for operands of a dtype, at most 24.

    Args:
        fast: include instances whose sums stay in the tensor core.
        full: return all that fit registers.
    """
    if full:
        return (*enumerate_all(gfx, dtype, blocks), *(enumerate_all(gfx, dtype, blocks, fast=True) if fast else ()))
    width, kernels = width_of(dtype), KERNELS[gfx][dtype]
    if kernels == SM80:
        multistage = functools.partial(CutlassInstance, schedule="multistage", scheduler="single")
        return tuple(multistage(m, n, k // width, warps=warps, stages=stages) for m, n, k, warps, stages in _MULTISTAGE)
    hopper = _BLOCKS if blocks else _EXACT if fast else _FP8 if dtype.startswith("fp8") else _HOPPER
    listed = _BLACKWELL[kernels][blocks] if kernels in _BLACKWELL else hopper
    exact = tuple(CutlassInstance(m, n, k // width, *rest) for m, n, k, *rest in listed)
    return exact + tuple(CutlassInstance(m, n, k // width, *rest, fast=True) for m, n, k, *rest in (_FAST if fast else ()))


def enumerate_all(gfx: str, dtype: str, blocks: bool, fast: bool = False) -> Iterator[CutlassInstance]:
    """Yield all instances for operands of a dtype that parameters and registers allow."""
    kernels, width, most = KERNELS[gfx][dtype], width_of(dtype), accumulators_of(dtype, fast)
    depths = [depth // width for depth in depths_of(dtype, gfx)]
    rings = list(itertools.product(WARPS[1:], STAGES[1:])) if kernels == SM80 else [((0, 0), 0)]
    for schedule in kernels.schedules:
        ways = itertools.product(TILES_M, TILES_N, depths, kernels.clusters, SCHEDULES[schedule], kernels.swaps)
        for m, n, k, cluster, scheduler, swap in ways:
            if blocks and (k != BLOCK or (m if swap else n) != BLOCK or m * n > BLOCK * BLOCK):
                continue
            for warps, stages in rings:
                with contextlib.suppress(PluginError):  # too many accumulators, a tile too small for two groups of warps
                    instance = CutlassInstance(m, n, k, cluster, schedule, scheduler, swap, warps, stages, fast)
                    if instance.accumulators <= most and not kernels.lack(instance):
                        yield instance


def enumerate_instances(shape: Shape, device: Device, full: bool) -> Iterator[Candidate]:
    """Yield instances with splitK that fit the shape, best guesses first; *full* yields all."""
    listed = listed_instances(device.gfx, shape.dtype, shape.scale == "block", full, may_be_fast(shape, device.gfx))
    fitting = [
        candidate for instance in listed for candidate in _with_splits(instance, shape, device) if not unfit(*candidate, shape, device)
    ]
    costs = {candidate: cost_of(*candidate, shape, device) for candidate in fitting}
    ordered = sorted(costs, key=lambda candidate: (costs[candidate], candidate[0].name, candidate[1]))
    for rank, candidate in enumerate(ordered):
        if full or rank < _LEAST or costs[candidate] <= WORSE * costs[ordered[0]]:
            yield candidate


def _with_splits(instance: CutlassInstance, shape: Shape, device: Device) -> Iterator[Candidate]:
    """Yield the splits worth timing: none, stream-K's, and the one or two that fill a wave best."""
    if instance.scheduler != "streamk":
        yield instance, 0
        return
    units, tiles = units_of(device), tiles_of(instance, shape)
    if tiles % units and ceil_div(shape.k, instance.tile_k) > 8:  # CUTLASS cuts no tile of 8 steps or fewer, and no full wave
        yield instance, 0
    most = min(units // tiles, shape.k // (instance.tile_k * LEAST_STEPS), MAX_SPLITS)
    for split in [value for value in SPLITS if 1 < value <= most][-2:]:
        yield instance, split


def enumerate_neighbours(instance: CutlassInstance, split: int, shape: Shape, device: Device) -> Iterator[Candidate]:
    """Yield the neighbours that fit."""
    seen = {(instance, split if split > 1 else 0)}
    for candidate in neighbours(instance, split):
        if candidate not in seen and not unfit(*candidate, shape, device):
            seen.add(candidate)
            yield candidate


def neighbours(instance: CutlassInstance, split: int) -> list[Candidate]:
    """Return the instances that differ in one parameter, or in splitK, by one step along its ladder.

    A scheduler changes together with its schedule.
    """
    changed: dict[str, tuple[object, ...]] = {
        "tile_m": _adjacent(TILES_M, instance.tile_m),
        "tile_n": _adjacent(TILES_N, instance.tile_n),
        "tile_k": _adjacent(TILES_K, instance.tile_k),
        "cluster": tuple(each for each in CLUSTERS if each != instance.cluster),
        "swap": (not instance.swap,),
        "fast": (not instance.fast,),
        "warps": tuple(each for each in WARPS if each != instance.warps),
        "stages": _adjacent(STAGES, instance.stages),
    }
    changed_candidates: list[Candidate] = [(instance, value) for value in _adjacent(SPLITS, split if split > 1 else 0)]
    for field, values in changed.items():
        changed_candidates += _evolved(instance, split, [{field: value} for value in values])
    ways = [{"schedule": schedule, "scheduler": scheduler} for schedule in SCHEDULES for scheduler in SCHEDULERS]
    return changed_candidates + _evolved(instance, 0, ways)


def _evolved(instance: CutlassInstance, split: int, changes: list[dict[str, object]]) -> list[Candidate]:
    evolved: list[Candidate] = []
    for change in changes:
        with contextlib.suppress(PluginError):  # not possible together
            evolve: Callable[..., CutlassInstance] = attrs.evolve
            evolved.append((evolve(instance, **change), split if split > 1 else 0))
    return evolved


def _adjacent(ladder: tuple[int, ...], value: int) -> tuple[int, ...]:
    below, above = [step for step in ladder if step < value], [step for step in ladder if step > value]
    return tuple(below[-1:] + above[:1])
