"""Spaces: which instances of Composable Kernel are worth timing for a shape, and the neighbours of one."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator

import attrs
from tunedgemm.plugin import Device, PluginError, Shape

from tunedgemm_ck.xdl.cost import cost, likely, more_parts
from tunedgemm_ck.xdl.instance import XdlInstance
from tunedgemm_ck.xdl.limits import MOST_SPLIT, depth, instances, misfit, static, tiles
from tunedgemm_ck.xdl.template import DEVICE_OPS

Chosen = tuple[XdlInstance, int]

#: How many of the listed instances of an op are there by default; `listed` tells what they cover.
DEFAULT = 16
_DEFAULTS = {"a8w8_bpreshuffle": 24}

#: Pipelines that CK has for a scheduler; with shuffled weights or block scales it has the first and the third, within a wave.
_PIPELINES = {"intrawave": (1, 2, 3, 4, 5), "interwave": (1, 2)}
_FEW_PIPELINES = {"intrawave": (1, 3), "interwave": ()}
_MANY = ("a16w16", "a8w8", "batched_bf16", "batched_a8w8")

#: Neighbours among the listed instances.
_NEAREST = 4


def space(shape: Shape, device: Device, full: bool) -> Iterable[Chosen]:
    """Instances with splits of K for a shape that is not refused, best guesses first; with *full* all that fit."""
    if static(shape, device):
        return []
    listed = instances(shape.op)
    offered = listed if full else listed[: _DEFAULTS.get(shape.op, DEFAULT)]
    costs: dict[Chosen, float] = {}
    for instance in offered:
        for split in splits(instance, shape, device):
            if not misfit(instance, split, shape, device):
                costs[instance, split] = _cost(instance, split, shape, device)
    return likely(costs, full)


def splits(instance: XdlInstance, shape: Shape, device: Device) -> Iterator[int]:
    """Logarithms of the parts of K that are worth a try: more parts as long as compute units would be idle without."""
    yield 0
    if not DEVICE_OPS[shape.op].split:
        return
    yield from more_parts(tiles(instance, shape), MOST_SPLIT, device)


def near(instance: XdlInstance, split: int, shape: Shape, device: Device) -> Iterator[Chosen]:
    """Neighbours of an instance that fit: another number of parts of K, another pipeline, the listed ones of nearly its tile."""
    if static(shape, device) or instance.op != shape.op:
        return
    beside = [(instance, split + step) for step in (-1, 1)] if DEVICE_OPS[shape.op].split else []
    beside += [(other, split) for other in _other_pipelines(instance)]
    others = [other for other in instances(shape.op) if other != instance]
    beside += [(other, split) for other in sorted(others, key=lambda other: (_apart(instance, other), other.name))[:_NEAREST]]
    for other, parts in dict.fromkeys(beside):
        if not misfit(other, parts, shape, device):
            yield other, parts


def _other_pipelines(instance: XdlInstance) -> Iterator[XdlInstance]:
    """The instance with each other pipeline of its scheduler."""
    allowed = _PIPELINES if instance.op in _MANY else _FEW_PIPELINES
    for pipeline in allowed[instance.scheduler]:
        if pipeline != instance.pipeline:
            with contextlib.suppress(PluginError):
                yield attrs.evolve(instance, pipeline=pipeline)


def _apart(one: XdlInstance, other: XdlInstance) -> float:
    """How far two tiles are apart: the sum of the logarithms of the ratios of their sides."""
    return sum(abs(math.log2(a / b)) for a, b in zip((one.m, one.n, one.k), (other.m, other.n, other.k), strict=True))


def _cost(instance: XdlInstance, split: int, shape: Shape, device: Device) -> float:
    return cost((instance.m, instance.n, depth(instance)), split, shape, device)
