"""Composable Kernel: instances of its device operations."""

from __future__ import annotations

from tunedgemm_ck.family import Family, Instance
from tunedgemm_ck.xdl.instance import FORMS, XdlInstance, parse
from tunedgemm_ck.xdl.limits import refused, unfit
from tunedgemm_ck.xdl.spaces import near, space
from tunedgemm_ck.xdl.template import DEVICE_OPS, flags, render


def _deterministic(instance: Instance, split: int) -> bool:
    """Parts of K are added atomically, in any order."""
    return split == 0 or not (isinstance(instance, XdlInstance) and DEVICE_OPS[instance.op].split)


FAMILY = Family(
    libtype="ck",
    kind="amd",
    ops=tuple(FORMS),
    refused=refused,
    space=space,
    parse=parse,
    unfit=unfit,  # type: ignore[arg-type]
    render=render,  # type: ignore[arg-type]
    flags=flags,  # type: ignore[arg-type]
    near=near,  # type: ignore[arg-type]
    deterministic=_deterministic,
    revision=1,
)
