"""Routes of a4w4_blockscale: mxfp4 operands, two e2m1 values a byte and one power of two for each 32 of them.

Launcher operands: x [..., K/2], weight [N, K/2], x_scale [M, K/32], w_scale [N, K/32] (both in AITER's shuffled form where the
layout is not ``row``), bias [N] or absent. A value times its scale is exact in bf16, whose exponents reach as far.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tunedgemm.device import Device
from tunedgemm.dtype import torch_dtype
from tunedgemm.shape import Shape
from tunedgemm.torch_backend.product import finished, products, rounded_products
from tunedgemm.torch_backend.route import Family, Route, weight_in_order

if TYPE_CHECKING:
    import torch

#: Elements of K that share a scale.
_GROUP = 32


def _dequantised(dtype: str) -> Callable[[Shape, Device, int], Callable[..., Any]]:
    def make(shape: Shape, device: Device, split: int) -> Callable[..., Any]:
        import torch

        from tunedgemm.quant import as_fp4, dequant_fp4

        del split
        n, k, out_dtype, inner = shape.n, shape.k, torch_dtype(shape.outdtype), torch_dtype(dtype)
        plain = inner == out_dtype and shape.bias_dtype in ("", shape.outdtype)
        on_cpu = inner == torch.bfloat16 and device.kind == "cpu"
        product = rounded_products if on_cpu else products(device, narrow=inner == torch.bfloat16)

        def values(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            rows = packed.view(torch.uint8).reshape(-1, k // 2)
            return dequant_fp4(as_fp4(rows), scale.reshape(-1, k // _GROUP), inner)

        def dequantised(x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor, bias: Any = None) -> Any:
            left, right, size = values(x, x_scale), values(weight, w_scale), (*x.shape[:-1], n)
            if plain:
                return torch._C._nn.linear(left, right, None if bias is None else bias.view(n)).view(size)
            return finished(product(left, right), bias, out_dtype, size)

        return dequantised

    return make


def _no_bf16(shape: Shape, device: Device) -> str:
    coarse = device.kind == "cpu" and shape.outdtype != "bf16"
    return f"rounds to bf16 on a CPU, too coarse for {shape.outdtype}" if coarse else ""


def _in_order(shape: Shape, call: Callable[..., Any]) -> Callable[..., Any]:
    """The weight and both scales in order."""
    from tunedgemm.quant import unshuffle_scale

    m, n, groups, ordered = shape.m, shape.n, shape.k // _GROUP, weight_in_order(shape, call)

    def scales_in_order(x: Any, weight: Any, x_scale: Any, w_scale: Any, *rest: Any) -> Any:
        return ordered(x, weight, unshuffle_scale(x_scale, m, groups), unshuffle_scale(w_scale, n, groups), *rest)

    return scales_in_order


def _native(shape: Shape, device: Device) -> str:
    return family.first(shape, device, "bf16", "float32")


family = Family(
    MappingProxyType({"bf16": Route(_dequantised("bf16"), _no_bf16), "float32": Route(_dequantised("fp32"))}), _native, _in_order
)
