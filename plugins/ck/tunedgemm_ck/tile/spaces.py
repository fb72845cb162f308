"""Spaces: which instances of CK Tile are worth timing for a shape, and the neighbours of one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import attrs
from tunedgemm.plugin import Device, Shape

from tunedgemm_ck.tile.instance import MOST_BLOCKS, TileInstance
from tunedgemm_ck.tile.limits import instances, misfit, of_architecture, static
from tunedgemm_ck.xdl.cost import cost, likely, more_parts
from tunedgemm_ck.xdl.limits import MOST_SPLIT

Chosen = tuple[TileInstance, int]

#: How many of the listed instances of an op that an architecture has are there by default; `listed` tells what they cover.
DEFAULT = 16

#: Neighbours among the listed instances.
_NEAREST = 4


def space(shape: Shape, device: Device, full: bool) -> Iterable[Chosen]:
    """Instances with splits of K for a shape that is not refused, best guesses first; with *full* all that fit."""
    if static(shape, device):
        return []
    offered = of_architecture(shape.op, device.gfx)
    costs: dict[Chosen, float] = {}
    for instance in offered if full else offered[:DEFAULT]:
        for split in splits(instance, shape, device):
            if not misfit(instance, split, shape, device):
                costs[instance, split] = cost(instance.tile, split, shape, device)
    return likely(costs, full)


def splits(instance: TileInstance, shape: Shape, device: Device) -> Iterator[int]:
    """Logarithms of the parts of K that are worth a try: more parts as long as compute units would be idle without."""
    yield 0
    if shape.op == "a8w8_bpreshuffle":
        return
    yield from more_parts(-(-shape.m // instance.tile[0]) * -(-shape.n // instance.tile[1]), MOST_SPLIT, device)


def near(instance: TileInstance, split: int, shape: Shape, device: Device) -> Iterator[Chosen]:
    """Neighbours of an instance that fit: another number of parts of K or of blocks a unit, the listed ones of nearly its tile."""
    if static(shape, device) or instance.op != shape.op:
        return
    beside = [(instance, split + step) for step in (-1, 1)]
    counts = (instance.blocks - 1, instance.blocks + 1)
    beside += [(attrs.evolve(instance, blocks=count), split) for count in counts if 1 <= count <= MOST_BLOCKS]
    others = [other for other in instances(shape.op) if other.tile != instance.tile]
    beside += [(other, split) for other in sorted(others, key=lambda other: (_apart(instance, other), other.name))[:_NEAREST]]
    for other, parts in dict.fromkeys(beside):
        if not misfit(other, parts, shape, device):
            yield other, parts


def _apart(one: TileInstance, other: TileInstance) -> float:
    """How far two tiles are apart: the sum of the logarithms of the ratios of their sides."""
    return sum(abs(math.log2(a / b)) for a, b in zip(one.tile, other.tile, strict=True))
