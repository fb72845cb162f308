"""Define the family ``ck``: instances of Composable Kernel's device operations."""

from __future__ import annotations

from collections.abc import Iterable

from tunedgemm.plugin import Device, Platform, Shape

from tunedgemm_ck.family import AMD_NEEDS, Candidate, Family, Instance
from tunedgemm_ck.names import parse_stages
from tunedgemm_ck.problem import Problem
from tunedgemm_ck.xdl import limits, names, space, template
from tunedgemm_ck.xdl.moe import limits as moe_limits
from tunedgemm_ck.xdl.moe import space as moe_space
from tunedgemm_ck.xdl.moe.names import MoeInstance, parse_moe
from tunedgemm_ck.xdl.moe.template import render_stage
from tunedgemm_ck.xdl.names import FORMS, XdlInstance

_MOE = "fmoe"


def _unsupported(shape: Shape, device: Device) -> str | None:
    return (moe_space if shape.op == _MOE else space).unserved(shape, device)


def _enumerate_instances(shape: Shape, device: Device, full: bool) -> Iterable[Candidate]:
    return (moe_space if shape.op == _MOE else space).enumerate_instances(shape, device, full)


def _parse(name: str, op: str) -> Instance:
    return parse_stages(name, "ck", parse_moe) if op == _MOE else names.parse_name(name, op)


def _unfit(instance: Instance, split: int, shape: Shape, device: Device) -> str | None:
    if shape.op == _MOE:
        return moe_limits.unfit(instance, split, shape, device)
    if not isinstance(instance, XdlInstance):
        return f"{instance.name} is an instance of {_MOE}"
    return limits.unfit(instance, split, shape, device)


def _render(instance: Instance, problem: Problem) -> str:
    if isinstance(instance, MoeInstance):
        return render_stage(instance, problem)
    return template.render(instance, problem)  # type: ignore[arg-type]


def _enumerate_neighbours(instance: Instance, split: int, shape: Shape, device: Device) -> Iterable[Candidate]:
    return (moe_space if shape.op == _MOE else space).enumerate_neighbours(instance, split, shape, device)  # type: ignore[arg-type]


def _deterministic(instance: Instance, split: int) -> bool:
    """Return whether the output repeats its bits: parts of K and experts are added atomically."""
    if isinstance(instance, XdlInstance):
        return split == 0 or not template.DEVICE_OPS[instance.op].split
    return False


FAMILY = Family(
    libtype="ck",
    kind="amd",
    ops=(*FORMS, _MOE),
    unsupported=_unsupported,
    enumerate_instances=_enumerate_instances,
    parse=_parse,
    unfit=_unfit,
    render=_render,
    flags=template.flags,  # type: ignore[arg-type]
    enumerate_neighbours=_enumerate_neighbours,
    deterministic=_deterministic,
    revision=1,
    platforms=(
        Platform(("gfx950",), needs=AMD_NEEDS),
        Platform(("gfx942",), needs=AMD_NEEDS, ops=tuple(op for op in (*FORMS, _MOE) if op != "a4w4_blockscale")),
        Platform(("gfx90a",), needs=AMD_NEEDS, ops=("a16w16", "a8w8", "batched_bf16", "batched_a8w8")),
    ),
)
