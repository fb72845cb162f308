"""Plan a product of mxfp4 weights: one launch."""

from __future__ import annotations

from typing import Any

from tunedgemm.plugin import Device, Shape

from tunedgemm_triton.build import TYPES
from tunedgemm_triton.mx.names import Mx
from tunedgemm_triton.mx.resources import partial_bytes, tiles_of
from tunedgemm_triton.plan import LaunchPlan, PlanBuilder, shuffled_rows


def plan_of(kernel: Mx, split_k: int, shape: Shape, device: Device) -> LaunchPlan:
    """Return the one launch for exactly this shape; needs no device."""
    del device
    builder, plain = PlanBuilder(), shape.dtype != "fp4x2"
    if split_k > 1:
        builder.buffer("partial", partial_bytes(kernel, split_k, shape))
    values: dict[str, Any] = {
        "x": ("*bf16" if plain else "*u8", "x"),
        "weight": ("*u8", "weight"),
        "x_scale": ("*u8", "w_scale" if plain else "x_scale"),
        "w_scale": ("*u8", "w_scale"),
        "bias": (f"*{TYPES[shape.bias_dtype or shape.outdtype]}", "bias"),
        "out": (f"*{TYPES[shape.outdtype]}", "out"),
        "partial": ("*fp32", "partial" if split_k > 1 else 0),
        "counters": ("*i32", builder.reserve_counters(tiles_of(kernel, shape)) if split_k > 1 else 0),
        "M": shape.m,
        "N": shape.n,
        "K": shape.k,
    }
    constants = {
        "BLOCK_M": kernel.block_m, "BLOCK_N": kernel.block_n, "BLOCK_K": kernel.block_k, "GROUP_M": kernel.group_m, "SWAP": kernel.swap,
        "DECODE": kernel.decode, "PLAIN": plain, "SHUFFLED": shuffled_rows(shape.layout), "SPLIT_K": split_k,
        "EVEN_K": shape.k % kernel.block_k == 0, "HAS_BIAS": shape.bias, "UPCAST": False,
    }  # fmt: skip
    builder.step("mx.mx", (tiles_of(kernel, shape), split_k), values, constants, num_warps=kernel.warps, num_stages=kernel.stages)
    return builder.plan()
