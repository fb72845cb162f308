"""Define the family ``cutlass``: its collectives and its sm_80 kernels, compiled by nvcc."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tunedgemm.plugin import Device, Platform, Shape

from tunedgemm_ck.cutlass import limits, names, space
from tunedgemm_ck.cutlass.moe import limits as moe_limits
from tunedgemm_ck.cutlass.moe import space as moe_space
from tunedgemm_ck.cutlass.template import flags, render
from tunedgemm_ck.family import Candidate, Family, Instance
from tunedgemm_ck.names import parse_stages

#: The op of grouped kernels, whose instances are two stages.
_MOE = "fmoe"


def _unsupported(shape: Shape, device: Device) -> str | None:
    return (moe_limits if shape.op == _MOE else limits).unsupported(shape, device)


def _unfit(instance: Any, split: int, shape: Shape, device: Device) -> str | None:
    return (moe_limits if shape.op == _MOE else limits).unfit(instance, split, shape, device)


def _enumerate_instances(shape: Shape, device: Device, full: bool) -> Iterable[Candidate]:
    return (moe_space if shape.op == _MOE else space).enumerate_instances(shape, device, full)


def _enumerate_neighbours(instance: Any, split: int, shape: Shape, device: Device) -> Iterable[Candidate]:
    return (moe_space if shape.op == _MOE else space).enumerate_neighbours(instance, split, shape, device)


def _parse(name: str, op: str) -> Instance:
    return parse_stages(name, "cutlass", lambda stage: names.parse_name(stage, op)) if op == _MOE else names.parse_name(name, op)


def _deterministic(instance: Instance, split: int) -> bool:
    """Return True: every sum has a fixed order.

    Stream-K adds the parts of K of a tile in order (`hopper.h`, ReductionMode::Deterministic), fmoe
    a token's pairs.
    """
    del instance, split
    return True


_HEADERS = "nvidia-cutlass (headers)"
_NEEDS = (_HEADERS, "nvcc of CUDA 12.0 or newer, until compiled")
FAMILY = Family(
    libtype="cutlass",
    kind="nvidia",
    ops=(*limits.OPS, _MOE),
    unsupported=_unsupported,
    enumerate_instances=_enumerate_instances,
    parse=_parse,
    unfit=_unfit,
    render=render,
    flags=flags,
    enumerate_neighbours=_enumerate_neighbours,
    deterministic=_deterministic,
    revision=names.REVISION,
    platforms=(
        Platform(("sm_90",), needs=_NEEDS, ran=("H200",)),
        Platform(
            ("sm_100", "sm_103", "sm_110", "sm_120", "sm_121"),
            needs=(_HEADERS, "nvcc of CUDA 12.9 or newer (sm_110: 13.0), until compiled"),
            ops=tuple(limits.OPS),
        ),
        Platform(("sm_80", "sm_86", "sm_89"), needs=_NEEDS, ops=tuple(op for op in limits.OPS if op != "a8w8_blockscale")),
    ),
)
