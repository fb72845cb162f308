"""Composable Kernel: instances of its device operations."""

from __future__ import annotations

from collections.abc import Iterable

from tunedgemm.plugin import Device, Shape

from tunedgemm_ck import stages
from tunedgemm_ck.family import Chosen, Family, Instance
from tunedgemm_ck.problem import Problem
from tunedgemm_ck.xdl import limits, moe_limits, moe_spaces, spaces, template
from tunedgemm_ck.xdl.instance import FORMS, XdlInstance
from tunedgemm_ck.xdl.instance import parse as parse_one
from tunedgemm_ck.xdl.moe import MoeInstance, parse_moe
from tunedgemm_ck.xdl.moe_template import render_stage

_MOE = "fmoe"


def _refused(shape: Shape, device: Device) -> str:
    return (moe_limits if shape.op == _MOE else limits).refused(shape, device)


def _space(shape: Shape, device: Device, full: bool) -> Iterable[Chosen]:
    return (moe_spaces if shape.op == _MOE else spaces).space(shape, device, full)


def _parse(name: str, op: str) -> Instance:
    return stages.parsed(name, "ck", parse_moe) if op == _MOE else parse_one(name, op)


def _unfit(instance: Instance, split: int, shape: Shape, device: Device) -> str:
    if shape.op == _MOE:
        return moe_limits.unfit(instance, split, shape, device)
    if not isinstance(instance, XdlInstance):
        return f"{instance.name} is an instance of {_MOE}"
    return limits.unfit(instance, split, shape, device)


def _render(instance: Instance, problem: Problem) -> str:
    if isinstance(instance, MoeInstance):
        return render_stage(instance, problem)
    return template.render(instance, problem)  # type: ignore[arg-type]


def _near(instance: Instance, split: int, shape: Shape, device: Device) -> Iterable[Chosen]:
    return (moe_spaces if shape.op == _MOE else spaces).near(instance, split, shape, device)  # type: ignore[arg-type]


def _deterministic(instance: Instance, split: int) -> bool:
    """Parts of K, and the experts of a token, are added atomically, in any order."""
    if isinstance(instance, XdlInstance):
        return split == 0 or not template.DEVICE_OPS[instance.op].split
    return False


FAMILY = Family(
    libtype="ck",
    kind="amd",
    ops=(*FORMS, _MOE),
    refused=_refused,
    space=_space,
    parse=_parse,
    unfit=_unfit,
    render=_render,
    flags=template.flags,  # type: ignore[arg-type]
    near=_near,
    deterministic=_deterministic,
    revision=1,
)
