"""List the pairs of instances worth timing for fmoe, best guesses first, and their neighbours.

Each stage is predicted as a batch of products, one for each expert that is hit, with the average
number of rows per expert.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

from tunedgemm.plugin import Device, Shape

from tunedgemm_ck.cutlass.cost import cost_of
from tunedgemm_ck.cutlass.moe.limits import stage_of, unfit, unfit_stage
from tunedgemm_ck.cutlass.names import CutlassInstance
from tunedgemm_ck.cutlass.resources import width_of
from tunedgemm_ck.cutlass.space import WORSE, enumerate_all, neighbours
from tunedgemm_ck.names import Stages

Candidate = tuple[Stages, int]

#: (tile_m, tile_n, bytes of tile_k, cluster, schedule, swap): large tiles for many rows per expert,
#: then swapped ones for few.
_Row = tuple[int, int, int, tuple[int, int], str, bool]
_WIDE: tuple[_Row, ...] = (
    (128, 256, 128, (1, 1), "cooperative", False),
    (128, 256, 128, (2, 1), "cooperative", False),
    (128, 128, 128, (1, 1), "cooperative", False),
    (128, 128, 128, (1, 1), "pingpong", False),
    (64, 256, 128, (1, 1), "pingpong", False),
    (64, 128, 128, (1, 1), "pingpong", False),
    (256, 128, 128, (1, 1), "cooperative", True),
    (128, 128, 128, (1, 1), "pingpong", True),
    (256, 64, 128, (1, 1), "cooperative", True),
    (128, 64, 128, (1, 1), "pingpong", True),
    (64, 64, 256, (1, 1), "pingpong", True),
    (128, 32, 256, (1, 1), "cooperative", True),
    (64, 32, 256, (1, 1), "pingpong", True),
    (128, 16, 256, (1, 1), "cooperative", True),
    (64, 16, 256, (1, 1), "pingpong", True),
)
#: The same for fp8, whose sums take twice the registers.
_FP8: tuple[_Row, ...] = (
    (128, 128, 128, (1, 1), "cooperative", False),
    (128, 128, 128, (2, 1), "cooperative", False),
    (256, 64, 128, (1, 1), "cooperative", False),
    (64, 128, 128, (1, 1), "pingpong", False),
    (128, 128, 128, (1, 1), "cooperative", True),
    (256, 64, 128, (1, 1), "cooperative", True),
    (128, 64, 128, (1, 1), "cooperative", True),
    (128, 64, 128, (1, 1), "pingpong", True),
    (64, 64, 128, (1, 1), "pingpong", True),
    (128, 32, 128, (1, 1), "cooperative", True),
    (64, 32, 128, (1, 1), "pingpong", True),
    (128, 16, 128, (1, 1), "cooperative", True),
    (64, 16, 128, (1, 1), "pingpong", True),
)
#: The same with block scales, which need 128 of K and 128 rows of the weight.
_BLOCKS: tuple[_Row, ...] = (
    (128, 128, 128, (1, 1), "cooperative", False),
    (128, 128, 128, (2, 1), "cooperative", False),
    (64, 128, 128, (1, 1), "pingpong", False),
    (128, 128, 128, (1, 1), "cooperative", True),
    *((128, n, 128, (1, 1), schedule, True) for n in (64, 32, 16) for schedule in ("cooperative", "pingpong")),
)
#: Instances of a stage that are paired with those of the other one.
_BEST = 4


@functools.cache
def listed_instances(q_type: str, q_dtype: str, full: bool) -> tuple[CutlassInstance, ...]:
    """Return the instances of either stage, at most 24; *full* returns all that fit registers."""
    if full:
        instances = enumerate_all("sm_90", q_dtype, q_type == "per_1x128")
        return tuple(instance for instance in instances if instance.scheduler == "persistent")
    listed, width = _BLOCKS if q_type == "per_1x128" else _FP8 if q_dtype.startswith("fp8") else _WIDE, width_of(q_dtype)
    return tuple(CutlassInstance(m, n, k // width, cluster, schedule, swap=swap) for m, n, k, cluster, schedule, swap in listed)


def cost_of_stages(stages: Stages, shape: Shape, device: Device) -> float:
    """Return the predicted microseconds of both products."""
    pairs = ((stages.first, 1), (stages.second, 2))
    return sum(cost_of(instance, 0, stage_of(shape, stage), device) for instance, stage in pairs)  # type: ignore[arg-type]


def enumerate_instances(shape: Shape, device: Device, full: bool) -> Iterator[Candidate]:
    """Yield pairs that fit the shape, best guesses first.

    The best of each stage make all their pairs; *full* also pairs every instance with the best of
    the other stage.
    """
    listed = listed_instances(str(shape["q_type"]), str(shape["q_dtype_w"]), full)
    ranked = [_ranked(listed, stage_of(shape, stage), device) for stage in (1, 2)]
    pairs = set(itertools.product(*(some[:_BEST] for some in ranked)))
    if full:
        (first, *_), (second, *_) = ranked
        pairs |= {(instance, second) for instance in ranked[0]} | {(first, instance) for instance in ranked[1]}
    costs = {stages: cost_of_stages(stages, shape, device) for stages in itertools.starmap(Stages, pairs)}
    ordered = sorted(costs, key=lambda stages: (costs[stages], stages.name))
    for stages in ordered:
        if full or costs[stages] <= WORSE * costs[ordered[0]]:
            yield stages, 0


def _ranked(listed: tuple[CutlassInstance, ...], stage: Shape, device: Device) -> list[CutlassInstance]:
    fitting = [instance for instance in listed if not unfit_stage(instance, stage)]
    return sorted(fitting, key=lambda instance: (cost_of(instance, 0, stage, device), instance.name))


def enumerate_neighbours(stages: Stages, split: int, shape: Shape, device: Device) -> Iterator[Candidate]:
    """Yield the neighbours that fit: one parameter of one stage, one step along its ladder."""
    del split
    seen = {stages}
    for index, instance in enumerate((stages.first, stages.second)):
        assert isinstance(instance, CutlassInstance)
        for changed, _ in neighbours(instance, 0):
            pair = Stages(stages.first, changed) if index else Stages(changed, stages.second)
            if pair not in seen and not unfit(pair, 0, shape, device):
                seen.add(pair)
                yield pair, 0
