"""Routes of a4w4_blockscale and a16w4_blockscale: a weight in mxfp4.

mxfp4 packs two e2m1 values in a byte, with one power of two for each 32 values. Launcher operands:
x [..., K/2], weight [N, K/2], x_scale [M, K/32], w_scale [N, K/32], bias [N] or absent. For
a16w4_blockscale: x [..., K], weight, w_scale, bias. Shuffled weights and scales are put in order in
each call. A value times its scale is exact in bf16, whose exponent range
suffices; x in fp16 is exact in TF32 and float32.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tunedgemm.backends.builtin.product import finish, products, rounded_products
from tunedgemm.backends.builtin.route import Family, Route, weight_in_order
from tunedgemm.device import Device
from tunedgemm.dtype import torch_dtype
from tunedgemm.ops.scale_order import ROW, scale_order
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch

#: Elements of K that share a scale.
_GROUP = 32


def _dequantised(dtype: str) -> Callable[[Shape, Device], Callable[..., Any]]:
    """Dequantise both operands to *dtype*, then multiply."""

    def make(shape: Shape, device: Device) -> Callable[..., Any]:
        values, product = _values(shape, dtype), _product(shape, device, dtype)

        def dequantised(x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor, bias: Any = None) -> Any:
            return product(values(x, x_scale), values(weight, w_scale), bias, x.shape[:-1])

        return dequantised

    return make


def _dequantised_weight(dtype: str) -> Callable[[Shape, Device], Callable[..., Any]]:
    """Dequantise the weight to *dtype*, then multiply it with x, which *dtype* holds exactly."""

    def make(shape: Shape, device: Device) -> Callable[..., Any]:
        k, inner = shape.k, torch_dtype(dtype)
        values, product = _values(shape, dtype), _product(shape, device, dtype)

        def dequantised_weight(x: torch.Tensor, weight: torch.Tensor, w_scale: torch.Tensor, bias: Any = None) -> Any:
            return product(x.reshape(-1, k).to(inner), values(weight, w_scale), bias, x.shape[:-1])

        return dequantised_weight

    return make


def _halved(shape: Shape, device: Device) -> Callable[..., Any]:
    """Split x into the sum of two bf16 parts, multiply each by the weight, and add both in float32.

    bf16 keeps 8 of the 11 bits of fp16 and can hold the remainder, too: nothing is rounded.
    """
    import torch

    n, k, out_dtype = shape.n, shape.k, torch_dtype(shape.outdtype)
    values, multiplied = _values(shape, "bf16"), products(device)

    def halved(x: torch.Tensor, weight: torch.Tensor, w_scale: torch.Tensor, bias: Any = None) -> torch.Tensor:
        flat = x.reshape(-1, k)
        high = flat.to(torch.bfloat16)
        low = (flat.float() - high.float()).nan_to_num(nan=0.0).to(torch.bfloat16)  # an infinity leaves no remainder
        first, second = multiplied(torch.cat((high, low)), values(weight, w_scale)).chunk(2)
        return finish(first + second, bias, out_dtype, (*x.shape[:-1], n))

    return halved


def _no_halves(shape: Shape, device: Device) -> str:
    if shape.dtype != "fp16":
        return f"splits fp16, not {shape.dtype}"
    return "has no product of bf16 in float32 on a CPU" if device.kind == "cpu" else ""


def _values(shape: Shape, dtype: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a function that dequantises a packed operand and its scales to [rows, K]."""
    import torch

    from tunedgemm.ops.formats.mxfp4 import as_fp4, dequant_fp4

    k, inner = shape.k, torch_dtype(dtype)

    def values(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        rows = packed.view(torch.uint8).reshape(-1, k // 2)
        return dequant_fp4(as_fp4(rows), scale.reshape(-1, k // _GROUP), inner)

    return values


def _product(shape: Shape, device: Device, dtype: str) -> Callable[..., torch.Tensor]:
    """Return a function that multiplies values [M, K] and [N, K] in *dtype*, with bias and reshaping."""
    import torch

    n, out_dtype, inner = shape.n, torch_dtype(shape.outdtype), torch_dtype(dtype)
    plain = inner == out_dtype and shape.bias_dtype in ("", shape.outdtype)
    on_cpu = inner == torch.bfloat16 and device.kind == "cpu"
    multiplied = rounded_products if on_cpu else products(device, narrow=inner == torch.bfloat16)

    def product(left: torch.Tensor, right: torch.Tensor, bias: Any, leading: tuple[int, ...]) -> torch.Tensor:
        size = (*leading, n)
        if plain:
            return torch._C._nn.linear(left, right, None if bias is None else bias.view(n)).view(size)
        return finish(multiplied(left, right), bias, out_dtype, size)

    return product


def _no_bf16(shape: Shape, device: Device) -> str:
    if shape.dtype == "fp16":
        return "has fewer bits than activations in fp16"
    coarse = device.kind == "cpu" and shape.outdtype != "bf16"
    return f"rounds to bf16 on a CPU, too coarse for {shape.outdtype}" if coarse else ""


def _in_order(shape: Shape, call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to take the weight and both scales in the shape's orders."""
    from tunedgemm.ops.formats.scales import unshuffle_scale

    m, n, groups, ordered = shape.m, shape.n, shape.k // _GROUP, weight_in_order(shape, call)
    if scale_order(shape) == ROW:
        return ordered

    def scales_in_order(x: Any, weight: Any, x_scale: Any, w_scale: Any, *rest: Any) -> Any:
        return ordered(x, weight, unshuffle_scale(x_scale, m, groups), unshuffle_scale(w_scale, n, groups), *rest)

    return scales_in_order


def _weight_in_order(shape: Shape, call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to take the weight and its scales in the shape's orders."""
    from tunedgemm.ops.formats.scales import unshuffle_scale

    n, groups, ordered = shape.n, shape.k // _GROUP, weight_in_order(shape, call)
    if scale_order(shape) == ROW:
        return ordered

    def scale_in_order(x: Any, weight: Any, w_scale: Any, *rest: Any) -> Any:
        return ordered(x, weight, unshuffle_scale(w_scale, n, groups), *rest)

    return scale_in_order


def _native(shape: Shape, device: Device) -> str:
    return both.first(shape, device, "bf16", "float32")


def _native_of_weight(shape: Shape, device: Device) -> str:
    return weight_alone.first(shape, device, "bf16", "halves", "float32")


both = Family(MappingProxyType({"bf16": Route(_dequantised("bf16"), _no_bf16), "float32": Route(_dequantised("fp32"))}), _native, _in_order)
weight_alone = Family(
    MappingProxyType(
        {
            "bf16": Route(_dequantised_weight("bf16"), _no_bf16),
            "halves": Route(_halved, _no_halves),
            "float32": Route(_dequantised_weight("fp32")),
        }
    ),
    _native_of_weight,
    _weight_in_order,
)
