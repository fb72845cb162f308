"""CK Tile: instances of its kernels."""

from __future__ import annotations

from tunedgemm_ck.family import Family, Instance
from tunedgemm_ck.tile.instance import PREFIXES, parse
from tunedgemm_ck.tile.limits import refused, unfit
from tunedgemm_ck.tile.spaces import near, space
from tunedgemm_ck.tile.template import flags, render


def _deterministic(instance: Instance, split: int) -> bool:
    """Parts of K are added atomically, in any order."""
    del instance
    return split == 0


FAMILY = Family(
    libtype="cktile",
    kind="amd",
    ops=tuple(PREFIXES),
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
