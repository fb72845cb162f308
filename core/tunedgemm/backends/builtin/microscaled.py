"""Routes of a8w8_mxfp8 and a4w4_nvfp4: cuBLASLt's product where it has one, else decoded operands.

Launcher operands: x, weight, x_scale, w_scale, of nvfp4 both global scales, bias [N] or absent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tunedgemm.backends.builtin.decoding import BF16, FLOAT32, family_of
from tunedgemm.backends.builtin.product import capability, finish, has_cuda
from tunedgemm.backends.builtin.route import Route
from tunedgemm.device import Device
from tunedgemm.dtype import torch_dtype
from tunedgemm.ops.decoding import in_rows, order_of_weight
from tunedgemm.ops.scale_order import SWIZZLED, field_of
from tunedgemm.ops.weight_formats import format_of
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch


def _scaled_mm(shape: Shape, device: Device) -> Callable[..., Any]:
    """Compute cuBLASLt's product; scales in other orders are put in tiles of 128x4 in each call."""
    import torch
    from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

    from tunedgemm.ops.formats.scales import E8M0, swizzle_scale

    del device
    form, order, n, out_dtype = format_of(shape), field_of(shape), shape.n, torch_dtype(shape.outdtype)
    values, scales = (torch.float4_e2m1fn_x2, torch.float8_e4m3fn) if form.has_global else (torch.float8_e4m3fn, E8M0)
    recipe, swizzle = [ScalingType.BlockWise1x16 if form.has_global else ScalingType.BlockWise1x32], [SwizzleType.SWIZZLE_32_4_4]
    if form.has_global:
        recipe, swizzle = [*recipe, ScalingType.TensorWise], [*swizzle, SwizzleType.NO_SWIZZLE]
    product_dtype = torch.float32 if shape.bias else out_dtype

    def in_tiles(scale: torch.Tensor, given: str, rows: int) -> torch.Tensor:
        return (scale if given == SWIZZLED else swizzle_scale(in_rows(shape, scale, given, rows))).view(scales)

    def call(x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor, *rest: Any) -> torch.Tensor:
        left, right = x.view(values).reshape(shape.m, x.shape[-1]), weight.view(values).t()
        by_x, by_w = [in_tiles(x_scale, order, shape.m)], [in_tiles(w_scale, order_of_weight(order), n)]
        if form.has_global:
            by_x, by_w = [*by_x, rest[0]], [*by_w, rest[1]]
        out = scaled_mm(left, right, by_x, recipe, by_w, recipe, swizzle, swizzle, output_dtype=product_dtype)
        return finish(out, rest[-1] if shape.bias else None, out_dtype, (*x.shape[:-1], n))

    return call


def _no_scaled_mm(shape: Shape, device: Device) -> str:
    import torch

    if capability(device) < 100:
        return f"multiplies {format_of(shape).name} on sm_100 and newer (got {device.gfx})"
    if not has_cuda(device, 12, 8):
        return f"needs CUDA 12.8 or newer (got {dict(device.versions)['cuda']})"
    if not hasattr(torch.nn.functional, "scaled_mm"):
        return "needs a torch with torch.nn.functional.scaled_mm"
    return "" if shape.n % 16 == 0 and shape.k % 32 == 0 else f"needs N divisible by 16 and K by 32 (N={shape.n}, K={shape.k})"


family = family_of(scaled_mm=Route(_scaled_mm, _no_scaled_mm), bf16=BF16, float32=FLOAT32)
