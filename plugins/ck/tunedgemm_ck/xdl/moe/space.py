"""List the pairs of CK's two stages of fmoe worth timing, and the neighbours of one.

The tiles are those that AITER's tables choose or its lists have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tunedgemm.plugin import Device, Shape
from tunedgemm.tools.launching import dtype_bits

from tunedgemm_ck.names import Stages
from tunedgemm_ck.xdl.cost import clocks, order_by_cost
from tunedgemm_ck.xdl.limits import none_fits
from tunedgemm_ck.xdl.moe.limits import instance_of, unfit_stage, unsupported
from tunedgemm_ck.xdl.moe.names import MoeInstance

Candidate = tuple[Stages, int]

#: Kind of the scales (``rows`` for per_Token and per_Tensor) and stage to tiles: threads, M, N and
#: K, waves along M and N, pipeline. They are in the order of how often AITER's tuned_fmoe tables of
#: August 2026 choose them.
TILES: dict[tuple[str, int], tuple[str, ...]] = {
    ("No", 1): (
        "256x32x64x64_1x4_v1",
        "256x32x64x128_1x4_v1",
        "256x64x128x64_1x4_v3",
        "256x128x128x128_1x4_v3",
        "256x64x64x128_1x4_v1",
        "256x128x64x64_1x4_v1",
        "256x128x128x64_1x4_v3",
    ),
    ("No", 2): (
        "256x32x64x64_1x4_v1",
        "256x64x128x128_1x4_v3",
        "256x128x128x64_1x4_v3",
        "256x32x64x128_1x4_v1",
        "256x64x64x64_1x4_v1",
        "256x128x64x64_1x4_v1",
    ),
    ("rows", 1): (
        "256x32x64x256_1x4_v1",
        "256x32x64x128_1x4_v1",
        "256x16x128x256_1x4_v1",
        "256x16x64x256_1x4_v1",
        "256x64x64x128_1x4_v1",
        "256x64x128x128_1x4_v3",
        "256x128x128x128_1x4_v3",
    ),
    ("rows", 2): (
        "256x32x64x128_1x4_v1",
        "256x32x64x256_1x4_v1",
        "256x16x128x256_1x4_v1",
        "64x16x64x64_1x1_v1",
        "256x64x128x256_1x4_v3",
        "256x64x128x128_1x4_v3",
        "256x128x128x128_1x4_v3",
    ),
    ("per_1x128", 1): (
        "256x16x128x256_1x4_v1",
        "256x64x128x128_1x4_v3",
        "256x32x128x128_1x4_v1",
        "256x64x128x128_1x4_v1",
        "128x16x128x128_1x2_v1",
    ),
    ("per_1x128", 2): (
        "256x16x128x256_1x4_v1",
        "256x64x128x128_1x4_v3",
        "256x64x128x128_1x4_v1",
        "256x32x128x128_1x4_v1",
        "128x16x128x128_1x2_v1",
    ),
}

#: Tiles of a kind and stage in the default space: 16 in all.
DEFAULTS = {("No", 1): 3, ("No", 2): 2, ("rows", 1): 3, ("rows", 2): 4, ("per_1x128", 1): 2, ("per_1x128", 2): 2}


def unserved(shape: Shape, device: Device) -> str | None:
    """Return why no pair of listed instances can serve a shape on a device, or None."""
    if reason := unsupported(shape, device):
        return reason
    both = (none_fits(unfit_stage(instance, shape, device) for instance in listed_stages(shape, device, stage)) for stage in (1, 2))
    return next(filter(None, both), None)


def enumerate_instances(shape: Shape, device: Device, full: bool) -> Iterable[Candidate]:
    """Return pairs for a supported shape, best guesses first; *full* pairs all listed that fit."""
    first, second = ({stage: _cost(stage, shape, device) for stage in _offered(shape, device, number, full)} for number in (1, 2))
    costs = {(Stages(a, b), 0): first[a] + second[b] for a in first for b in second}
    return order_by_cost(costs, full)


def enumerate_neighbours(instance: Stages, split: int, shape: Shape, device: Device) -> Iterator[Candidate]:
    """Yield pairs of which one stage is another listed one."""
    del split
    for other in _offered(shape, device, 1, full=True):
        if other != instance.first:
            yield Stages(other, instance.second), 0
    for other in _offered(shape, device, 2, full=True):
        if other != instance.second:
            yield Stages(instance.first, other), 0


def _offered(shape: Shape, device: Device, stage: int, full: bool) -> list[MoeInstance]:
    """Return a stage's listed instances that fit; without *full* at most `DEFAULTS` of a kind."""
    instances = listed_stages(shape, device, stage)
    most = None if full else DEFAULTS[kind_of(shape), stage]
    fitting = [instance for instance in instances[:most] if not unfit_stage(instance, shape, device)]
    # a shape whose sizes none of the first divides still has others
    return fitting or [instance for instance in instances if not unfit_stage(instance, shape, device)]


def _cost(of: MoeInstance, shape: Shape, device: Device) -> float:
    """Return the clocks of a stage, with tokens spread evenly over the experts likely hit."""
    experts, pairs = int(shape["expert"]), shape.m * int(shape["topk"])
    hit = max(experts * (1.0 - (1.0 - 1.0 / experts) ** pairs), 1.0)
    rows = pairs / hit
    n, k, wide = (shape.k, shape.n, 2) if of.stage == 1 else (shape.n, shape.k, 1)  # stage 1 multiplies gate and up
    blocks = hit * -(-rows // of.m) * (n // of.n)
    bits = dtype_bits(str(shape["q_dtype_w"]))
    return clocks((of.m, of.n * wide, of.k), min(rows, of.m) + of.n * wide, k // of.k, blocks / max(device.cu_num, 1), bits)


def listed_stages(shape: Shape, device: Device, stage: int) -> tuple[MoeInstance, ...]:
    """Return all listed instances of a stage for a supported shape, in the order of `TILES`."""
    return tuple(instance_of(tile, shape, device.gfx, stage) for tile in TILES[kind_of(shape), stage])


def kind_of(shape: Shape) -> str:
    """Return the kind of the scales, as a key of `TILES`."""
    return {"per_Tensor": "rows", "per_Token": "rows"}.get(str(shape["q_type"]), str(shape["q_type"]))
