"""Plan a product of a packed weight: one launch."""

from __future__ import annotations

from typing import Any

from tunedgemm.plugin import Device, Shape
from tunedgemm.tools.launching import WeightFormat, format_of

from tunedgemm_triton.build import TYPES, Constant
from tunedgemm_triton.packed.names import Mx, Packed, Wnv
from tunedgemm_triton.packed.resources import has_index, kind_of, lanes_of, partial_bytes, scaled_of, span_of, step_of, tiles_of, vector_of
from tunedgemm_triton.plan import LaunchPlan, PlanBuilder, shuffled_rows

#: Triton's names of the dtypes of stored weights and scales that `build.TYPES` lacks.
_STORED = {**TYPES, "int32": "i32", "uint8": "u8", "fp4x2": "u8", "e8m0": "u8"}


def plan_of(kernel: Packed, split_k: int, shape: Shape, device: Device) -> LaunchPlan:
    """Return the one launch for exactly this shape; needs no device."""
    builder = PlanBuilder()
    if split_k > 1:
        builder.buffer("partial", partial_bytes(kernel, split_k, shape))
    operands, constants = _of_mxfp4(kernel, shape) if isinstance(kernel, Mx) else _of_format(shape)
    if isinstance(kernel, Wnv):
        constants |= _of_threads(kernel, shape, device)
    else:
        constants |= {"BLOCK_K": kernel.block_k, "GROUP_M": kernel.group_m, "SWAP": kernel.swap}
    values: dict[str, Any] = {
        **operands,
        "bias": (f"*{TYPES[shape.bias_dtype or shape.outdtype]}", "bias" if shape.bias else 0),
        "out": (f"*{TYPES[shape.outdtype]}", "out"),
        "partial": ("*fp32", "partial" if split_k > 1 else 0),
        "counters": ("*i32", builder.reserve_counters(tiles_of(kernel, shape)) if split_k > 1 else 0),
        "M": shape.m,
        "N": shape.n,
        "K": shape.k,
    }
    constants |= {
        "BLOCK_M": kernel.block_m, "BLOCK_N": kernel.block_n, "SPLIT_K": split_k, "EVEN_K": shape.k % step_of(kernel, shape) == 0,
        "HAS_BIAS": shape.bias, "UPCAST": False,
    }  # fmt: skip
    function, stages = f"{kernel.family}.{kernel.family}", 1 if isinstance(kernel, Wnv) else kernel.stages
    builder.step(function, (tiles_of(kernel, shape), split_k), values, constants, num_warps=kernel.warps, num_stages=stages)
    return builder.plan()


def _of_mxfp4(kernel: Mx, shape: Shape) -> tuple[dict[str, Any], dict[str, Constant]]:
    """Return the operands and the constants of a product of mxfp4."""
    plain = shape.dtype != "fp4x2"
    operands = {
        "x": ("*bf16" if plain else "*u8", "x"),
        "weight": ("*u8", "weight"),
        "x_scale": ("*u8", "w_scale" if plain else "x_scale"),
        "w_scale": ("*u8", "w_scale"),
    }
    return operands, {"DECODE": kernel.decode, "PLAIN": plain, "SHUFFLED": shuffled_rows(shape.layout)}


def _of_format(shape: Shape) -> tuple[dict[str, Any], dict[str, Constant]]:
    """Return the operands and the constants of a product of a weight-only format."""
    form = format_of(shape)
    operands = {
        "x": (f"*{TYPES[shape.dtype]}", "x"),
        "weight": (f"*{_STORED[form.dtypes[0]]}", "weight"),
        "w_scale": (f"*{_STORED[(*form.scale, shape.dtype)[0]]}", "w_scale"),
        "w_zeros": ("*i32", 0 if form.zeros is None else "w_zeros"),
        "w_index": ("*i32", "w_index" if has_index(shape) else 0),
        "w_global_scale": ("*fp32", "w_global_scale" if form.has_global else 0),
    }
    return operands, {"SCALED": scaled_of(shape), "GROUP": int(shape["w_group"]), "HAS_INDEX": has_index(shape), **_constants(form)}


def _of_threads(kernel: Wnv, shape: Shape, device: Device) -> dict[str, Constant]:
    """Return the constants of a product on the vector units."""
    lanes, vector = lanes_of(kernel, shape, device), vector_of(kernel, shape, device)
    return {"LANES": lanes, "VECTOR": vector, "SPAN": span_of(kernel, shape), "UNROLL": kernel.unroll}


def _constants(form: WeightFormat) -> dict[str, Constant]:
    """Return the function's constants of a format's record."""
    kind = kind_of(form)
    return {
        "IS_KN": form.is_kn, "ALONG_N": form.along == "n", "PER": form.per, "BITS": form.bits,
        "ORDER": sum(form.order.index(place) << 4 * place for place in range(form.per)),
        "VALUES": kind, "ZERO": -int(form.values[0]) if kind == "integer" else 0, "ADDED": -1 if form.zeros is None else form.zeros,
        "ROWS": form.rows, "POWER": "e8m0" in form.scale, "HAS_GLOBAL": form.has_global,
    }  # fmt: skip
