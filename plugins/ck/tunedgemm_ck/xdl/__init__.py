"""Define the family ``ck``: instances of Composable Kernel's device operations."""

from __future__ import annotations

from tunedgemm.plugin import Platform

from tunedgemm_ck.family import AMD_NEEDS, MOE, Family, Instance, routed
from tunedgemm_ck.names import parse_stages
from tunedgemm_ck.problem import Problem
from tunedgemm_ck.xdl import limits, names, space, template
from tunedgemm_ck.xdl.moe import limits as moe_limits
from tunedgemm_ck.xdl.moe import space as moe_space
from tunedgemm_ck.xdl.moe.names import MoeInstance, parse_moe
from tunedgemm_ck.xdl.moe.template import render_stage
from tunedgemm_ck.xdl.names import FORMS, XdlInstance


def _render(instance: Instance, problem: Problem) -> str:
    if isinstance(instance, MoeInstance):
        return render_stage(instance, problem)
    return template.render(instance, problem)  # type: ignore[arg-type]


def _deterministic(instance: Instance, split: int) -> bool:
    """Return whether the output repeats its bits: parts of K and experts are added atomically."""
    return isinstance(instance, XdlInstance) and (split == 0 or not template.DEVICE_OPS[instance.op].split)


#: Ops and units for which the first 24 of a list held 95 % of the winners of AITER's rows, on
#: layers that were not fitted.
_RANKED = {
    "gfx950": ("a8w8_blockscale:256", "a8w8_bpreshuffle:256", "a8w8_blockscale_bpreshuffle:256", "a4w4_blockscale:256"),
    "gfx942": ("a8w8_blockscale:304", "a8w8_bpreshuffle:80", "a8w8_blockscale_bpreshuffle:80"),
}

FAMILY = Family(
    libtype="ck",
    kind="amd",
    ops=(*FORMS, MOE),
    unsupported=routed(moe_space.unserved, space.unserved),
    enumerate_instances=routed(moe_space.enumerate_instances, space.enumerate_instances),
    parse=lambda name, op: parse_stages(name, "ck", parse_moe) if op == MOE else names.parse_name(name, op),
    unfit=routed(moe_limits.unfit, limits.unfit_sizes),
    render=_render,
    flags=template.flags,  # type: ignore[arg-type]
    enumerate_neighbours=routed(moe_space.enumerate_neighbours, space.enumerate_neighbours),
    deterministic=_deterministic,
    revision=1,
    enumerate_untuned=space.enumerate_untuned,
    platforms=(
        Platform(("gfx950",), needs=AMD_NEEDS, ranked=_RANKED["gfx950"]),
        Platform(("gfx942",), needs=AMD_NEEDS, ops=tuple(op for op in (*FORMS, MOE) if op != "a4w4_blockscale"), ranked=_RANKED["gfx942"]),
        Platform(("gfx90a",), needs=AMD_NEEDS, ops=("a16w16", "a8w8", "batched_bf16", "batched_a8w8")),
    ),
)
