"""Routes of ops whose operands records of formats decode (`tunedgemm.ops.decoding`).

The weight, and in ops of both sides x too, are put in order and decoded in each call. A value times
its scale is exact in bf16 for mxfp4 and nvfp4, and for mxfp8 with scales from 2^-124 to 2^119. So
decoding adds no error, and products differ in the order of their sums alone. Other formats round
once to the dtype of x. Global scales and the bias follow the product in float32. A process that
lowers the precision of float32 products lowers it in ``float32``, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tunedgemm.backends.builtin.product import finish, products, rounded_products
from tunedgemm.backends.builtin.route import Family, Route
from tunedgemm.device import Device
from tunedgemm.dtype import torch_dtype
from tunedgemm.ops.decoding import Decoded, decoded
from tunedgemm.ops.weight_formats import format_of
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch


def family_of(**routes: Route) -> Family:
    """Return the family of an op's routes, of which the first that fits is native, else the last.

    They take operands in the shape's layout and orders.
    """
    family = Family(MappingProxyType(routes), lambda shape, device: family.first(shape, device, *routes), lambda _, call: call)
    return family


def _decoded(dtype: str = "") -> Callable[[Shape, Device], Callable[..., Any]]:
    """Decode to *dtype*, by default that of x, then multiply in it."""

    def make(shape: Shape, device: Device) -> Callable[..., Any]:
        import torch

        inner = torch_dtype(dtype or shape.dtype)
        is_narrow, is_plain = inner.itemsize == 2, _is_plain(shape, dtype or shape.dtype)
        multiplied = rounded_products if is_narrow and device.kind == "cpu" else products(device, narrow=is_narrow)

        def call(x: torch.Tensor, *operands: Any) -> torch.Tensor:
            parts = decoded(shape, (x, *operands), inner)
            if is_plain:
                bias = None if parts.bias is None else parts.bias.view(shape.n)
                return torch._C._nn.linear(parts.x, parts.weight, bias).view(*x.shape[:-1], shape.n)
            return _finished(shape, parts, multiplied(parts.x, parts.weight), x)

        return call

    return make


def _halved(shape: Shape, device: Device) -> Callable[..., Any]:
    """Split x into the sum of two bf16 parts, multiply each by the weight, and add both in float32.

    bf16 keeps 8 of the 11 bits of fp16 and can hold the remainder, too: nothing is rounded.
    """
    import torch

    multiplied = products(device)

    def call(x: torch.Tensor, *operands: Any) -> torch.Tensor:
        parts = decoded(shape, (x, *operands), torch.bfloat16)
        low = x.reshape(-1, shape.k).float() - parts.x.float()
        low = low.nan_to_num(nan=0.0).to(torch.bfloat16)  # an infinity leaves no remainder
        first, second = multiplied(torch.cat((parts.x, low)), parts.weight).chunk(2)
        return _finished(shape, parts, first + second, x)

    return call


def _finished(shape: Shape, parts: Decoded, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Multiply a float32 product by global scales, add the bias, round once and reshape."""
    out = out.mul_(functools.reduce(lambda one, two: one * two, parts.factors)) if parts.factors else out
    return finish(out, parts.bias, torch_dtype(shape.outdtype), (*x.shape[:-1], shape.n))


def _is_plain(shape: Shape, dtype: str) -> bool:
    """Check that a product of *dtype* is the result, or is with a bias of its dtype."""
    return shape.outdtype == dtype and shape.bias_dtype in ("", dtype) and not format_of(shape).has_global


def _too_coarse(dtype: str = "") -> Callable[[Shape, Device], str]:
    """Return why values or a product in *dtype*, by default that of x, are too coarse; "" if not."""

    def unfit(shape: Shape, device: Device) -> str:
        form, inner, on_cpu = format_of(shape), dtype or shape.dtype, device.kind == "cpu"
        if inner == "bf16" and shape.dtype == "fp16":
            return "has fewer bits than activations in fp16"
        if inner == "fp16" and {"fp32", "e8m0"} & set(form.scale):
            return f"has less range than scales in {form.scale[0]}"
        if on_cpu and form.has_global:
            return f"rounds to {inner} on a CPU before global scales"
        if shape.outdtype != inner and (on_cpu or inner not in form.exact):
            what = f"to {inner} on a CPU" if on_cpu else f"values of {form.name} to {inner}"
            return f"rounds {what}, too coarse for {shape.outdtype}"
        return ""

    return unfit


def _no_halves(shape: Shape, device: Device) -> str:
    if shape.dtype != "fp16":
        return f"splits fp16, not {shape.dtype}"
    if "bf16" not in format_of(shape).exact:
        return f"rounds values of {format_of(shape).name} to bf16, too coarse for fp16"
    return "has no product of bf16 in float32 on a CPU" if device.kind == "cpu" else ""


DTYPE_OF_X, BF16 = Route(_decoded(), _too_coarse()), Route(_decoded("bf16"), _too_coarse("bf16"))
HALVES, FLOAT32 = Route(_halved, _no_halves), Route(_decoded("fp32"))

both = family_of(bf16=BF16, float32=FLOAT32)
weight_alone = family_of(bf16=BF16, halves=HALVES, float32=FLOAT32)
weight_of_any_format = family_of(decoded=DTYPE_OF_X, halves=HALVES, float32=FLOAT32)
