"""Define the family ``cktile``: instances of CK Tile's kernels."""

from __future__ import annotations

from tunedgemm.plugin import Platform

from tunedgemm_ck.family import AMD_NEEDS, Family
from tunedgemm_ck.tile.limits import unfit_sizes
from tunedgemm_ck.tile.names import PREFIXES, parse_name
from tunedgemm_ck.tile.space import enumerate_instances, enumerate_neighbours, unserved
from tunedgemm_ck.tile.template import flags, render

FAMILY = Family(
    libtype="cktile",
    kind="amd",
    ops=tuple(PREFIXES),
    unsupported=unserved,
    enumerate_instances=enumerate_instances,
    parse=parse_name,
    unfit=unfit_sizes,  # type: ignore[arg-type]
    render=render,  # type: ignore[arg-type]
    flags=flags,  # type: ignore[arg-type]
    enumerate_neighbours=enumerate_neighbours,  # type: ignore[arg-type]
    deterministic=lambda _, split: split == 0,  # parts of K are added atomically
    revision=1,
    # as those of ck, the first 24 hold 95 % of the winners of rows that were not fitted
    platforms=(
        Platform(("gfx942",), needs=AMD_NEEDS),
        Platform(("gfx950",), needs=AMD_NEEDS, ranked=("a8w8_blockscale:256", "a8w8_bpreshuffle:256")),
    ),
)
