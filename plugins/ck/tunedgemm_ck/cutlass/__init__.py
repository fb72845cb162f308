"""Define the family ``cutlass``: its collectives and its sm_80 kernels, compiled by nvcc."""

from __future__ import annotations

from tunedgemm.plugin import Platform

from tunedgemm_ck.cutlass import limits, names, space
from tunedgemm_ck.cutlass.moe import limits as moe_limits
from tunedgemm_ck.cutlass.moe import space as moe_space
from tunedgemm_ck.cutlass.template import flags, render
from tunedgemm_ck.family import MOE, Family, Instance, routed
from tunedgemm_ck.names import parse_stages


def _parse(name: str, op: str) -> Instance:
    return parse_stages(name, "cutlass", lambda stage: names.parse_name(stage, op)) if op == MOE else names.parse_name(name, op)


_HEADERS = "nvidia-cutlass (headers)"
_NEEDS = (_HEADERS, "nvcc of CUDA 12.0 or newer, until compiled")
FAMILY = Family(
    libtype="cutlass",
    kind="nvidia",
    ops=(*limits.OPS, MOE),
    unsupported=routed(moe_limits.unsupported, limits.unsupported),
    enumerate_instances=routed(moe_space.enumerate_instances, space.enumerate_instances),
    parse=_parse,
    unfit=routed(moe_limits.unfit, limits.unfit),
    render=render,
    flags=flags,
    enumerate_neighbours=routed(moe_space.enumerate_neighbours, space.enumerate_neighbours),
    # Stream-K adds the parts of K of a tile in order (`hopper.h`, ReductionMode::Deterministic),
    # fmoe a token's pairs.
    deterministic=lambda *_: True,
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
