"""CUTLASS: instances of its sm_90 collectives and of its sm_80 kernels, compiled by nvcc for each class of shapes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tunedgemm.plugin import Device, Shape

from tunedgemm_ck.cutlass import grouped, limits, spaces
from tunedgemm_ck.cutlass import instance as plain
from tunedgemm_ck.cutlass.limits import OPS
from tunedgemm_ck.cutlass.template import flags, render
from tunedgemm_ck.family import Chosen, Family, Instance

#: The op that grouped kernels serve, whose instances are two stages.
ROUTED = "fmoe"


def _refused(shape: Shape, device: Device) -> str:
    return (grouped if shape.op == ROUTED else limits).refused(shape, device)


def _unfit(instance: Any, split: int, shape: Shape, device: Device) -> str:
    return (grouped if shape.op == ROUTED else limits).unfit(instance, split, shape, device)


def _space(shape: Shape, device: Device, full: bool) -> Iterable[Chosen]:
    return (grouped if shape.op == ROUTED else spaces).space(shape, device, full)


def _near(instance: Any, split: int, shape: Shape, device: Device) -> Iterable[Chosen]:
    return (grouped if shape.op == ROUTED else spaces).near(instance, split, shape, device)


def _parse(name: str, op: str) -> Instance:
    return (grouped if op == ROUTED else plain).parse(name, op)


def _deterministic(instance: Instance, split: int) -> bool:
    """Always: stream-K adds the parts of K of a tile in their order (`hopper.h`, ReductionMode::Deterministic), fmoe a token's pairs."""
    del instance, split
    return True


FAMILY = Family(
    libtype="cutlass",
    kind="nvidia",
    ops=(*OPS, ROUTED),
    refused=_refused,
    space=_space,
    parse=_parse,
    unfit=_unfit,
    render=render,
    flags=flags,
    near=_near,
    deterministic=_deterministic,
    revision=plain.REVISION,
)
