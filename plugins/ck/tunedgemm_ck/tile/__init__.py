"""Define the family ``cktile``: instances of CK Tile's kernels."""

from __future__ import annotations

from tunedgemm.plugin import Platform

from tunedgemm_ck.family import AMD_NEEDS, Family, Instance
from tunedgemm_ck.tile.limits import unfit
from tunedgemm_ck.tile.names import PREFIXES, parse_name
from tunedgemm_ck.tile.space import enumerate_instances, enumerate_neighbours, unserved
from tunedgemm_ck.tile.template import flags, render


def _deterministic(instance: Instance, split: int) -> bool:
    """Return whether the output repeats its bits: parts of K are added atomically."""
    del instance
    return split == 0


FAMILY = Family(
    libtype="cktile",
    kind="amd",
    ops=tuple(PREFIXES),
    unsupported=unserved,
    enumerate_instances=enumerate_instances,
    parse=parse_name,
    unfit=unfit,  # type: ignore[arg-type]
    render=render,  # type: ignore[arg-type]
    flags=flags,  # type: ignore[arg-type]
    enumerate_neighbours=enumerate_neighbours,  # type: ignore[arg-type]
    deterministic=_deterministic,
    revision=1,
    platforms=(Platform(("gfx942", "gfx950"), needs=AMD_NEEDS),),
)
