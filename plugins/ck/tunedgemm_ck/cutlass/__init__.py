"""CUTLASS: instances of its sm_90 collectives and of its sm_80 kernels, compiled by nvcc for each class of shapes."""

from __future__ import annotations

from tunedgemm_ck.cutlass.instance import REVISION, CutlassInstance, parse
from tunedgemm_ck.cutlass.limits import OPS, refused, unfit
from tunedgemm_ck.cutlass.spaces import near, space
from tunedgemm_ck.cutlass.template import flags, render
from tunedgemm_ck.family import Family


def _deterministic(instance: CutlassInstance, split: int) -> bool:
    """Always: stream-K adds the parts of K of a tile in their order (`hopper.h`, ReductionMode::Deterministic)."""
    del instance, split
    return True


FAMILY = Family(
    libtype="cutlass",
    kind="nvidia",
    ops=tuple(OPS),
    refused=refused,
    space=space,
    parse=parse,
    unfit=unfit,
    render=render,
    flags=flags,
    near=near,
    deterministic=_deterministic,
    revision=REVISION,
)
