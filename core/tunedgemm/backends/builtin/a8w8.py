"""Routes of a8w8 and a8w8_bpreshuffle: int8 or fp8 operands, per-tensor or row-wise scales.

Launcher operands: x [..., K], weight [N, K], x_scale of M values or one, w_scale of N values or
one, bias [N] or absent.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tunedgemm.backends.builtin.product import (
    aligned,
    capability,
    cublas_scales,
    finish,
    no_fp8,
    products,
    rescale,
    rounded_products,
    scaled_float32,
)
from tunedgemm.backends.builtin.route import Family, Route
from tunedgemm.device import Device
from tunedgemm.dtype import torch_dtype
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch

#: M that `torch._int_mm` on a GPU requires to be exceeded.
INT_ROWS = 16
#: M to which calls are padded for it.
PADDED_ROWS = 32
#: K from which its int32 sums may overflow.
INT_K = 1 << 17


def _scaled_after(shape: Shape, product: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Compute the values' product without rounding, then scales and bias in float32, and round once."""
    n, k, out_dtype = shape.n, shape.k, torch_dtype(shape.outdtype)

    def scaled(x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor, bias: Any = None) -> torch.Tensor:
        out = rescale(product(x.reshape(-1, k), weight), x_scale.reshape(-1, 1), w_scale.reshape(1, -1), bias, out_dtype)
        return out.view(*x.shape[:-1], n)

    return scaled


def _scaled_mm(fast: bool) -> Callable[[Shape, Device], Callable[..., Any]]:
    def make(shape: Shape, device: Device) -> Callable[..., Any]:
        import torch

        del device
        n, k, out_dtype, by_row = shape.n, shape.k, torch_dtype(shape.outdtype), shape.scale == "row"
        x_form, w_form = ((-1, 1), (1, -1)) if by_row else ((), ())

        def scaled_mm(x: torch.Tensor, weight: torch.Tensor, x_scale: Any, w_scale: Any, bias: Any = None) -> torch.Tensor:
            out = torch._scaled_mm(
                x.reshape(-1, k), weight.t(), aligned(x_scale.reshape(x_form)), aligned(w_scale.reshape(w_form)),
                bias=None if bias is None else bias.view(n), out_dtype=out_dtype, use_fast_accum=fast,
            )  # fmt: skip
            return out.view(*x.shape[:-1], n)

        return scaled_mm

    return make


def _no_scaled_mm(shape: Shape, device: Device) -> str:
    """Return why `torch._scaled_mm` cannot compute the shape, or "".

    It adds a bias in the output's dtype instead of float32; where CUTLASS scales rows, the output
    is bf16.
    """
    if reason := no_fp8(shape, device):
        return reason
    if device.kind != "cpu" and shape.scale == "row" and shape.outdtype != "bf16" and not cublas_scales(device):
        return f"with one scale a row gives bf16, not {shape.outdtype}"
    if shape.bias and (shape.bias_dtype != shape.outdtype or shape.outdtype not in ("bf16", "fp16")):
        return f"adds no {shape.bias_dtype} bias to a {shape.outdtype} output"
    return ""


def _no_fast(shape: Shape, device: Device) -> str:
    """Return why fast accumulation does not apply, or "".

    On request Hopper and Ada sum fp8 products in fewer bits, which suffices for bf16 outputs alone.
    """
    if capability(device) not in (89, 90):
        return f"is the same as scaled_mm on {device.gfx}"
    return _no_scaled_mm(shape, device) or ("" if shape.outdtype == "bf16" else f"is too coarse for {shape.outdtype}")


def _scaled_mm_rows(shape: Shape, device: Device) -> Callable[..., Any]:
    """Compute the scaled product in float32, add the bias, and round once."""
    n, k, out_dtype, product = shape.n, shape.k, torch_dtype(shape.outdtype), scaled_float32(shape.m, shape.n, device)

    def scaled_mm_rows(x: torch.Tensor, weight: torch.Tensor, x_scale: Any, w_scale: Any, bias: Any = None) -> torch.Tensor:
        return finish(product(x.reshape(-1, k), weight, x_scale, w_scale), bias, out_dtype, (*x.shape[:-1], n))

    return scaled_mm_rows


def no_int(shape: Shape, device: Device) -> str:
    """Return why `torch._int_mm` cannot multiply the shape, whatever its number of rows; "" where it can."""
    if shape.dtype != "int8":
        return f"multiplies int8, not {shape.dtype}"
    if shape.k >= INT_K:
        return f"needs K below {INT_K}, as its sums have 32 bits (K={shape.k})"
    if shape.k == 1:  # the strides of a column are those of its transpose, and torch 2.13 takes one for the other
        return "computes wrong products of one column (K=1)"
    if device.kind != "cpu" and (shape.n % 8 or shape.k % 8):
        return f"needs N and K divisible by 8 (N={shape.n}, K={shape.k})"
    return ""


def _no_int_rows(shape: Shape, device: Device) -> str:
    few = device.kind != "cpu" and shape.m <= INT_ROWS
    return no_int(shape, device) or (f"needs more than {INT_ROWS} rows (M={shape.m})" if few else "")


def _no_int_padded(shape: Shape, device: Device) -> str:
    padded = device.kind != "cpu" and shape.m <= INT_ROWS
    return no_int(shape, device) or ("" if padded else "pads where int_mm has too few rows")


def _int_mm(shape: Shape, device: Device) -> Callable[..., Any]:
    import torch

    del device
    return _scaled_after(shape, lambda x, weight: torch._int_mm(x, weight.t()))


def _int_mm_padded(shape: Shape, device: Device) -> Callable[..., Any]:
    import torch

    del device
    rows = shape.m

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(x, (0, 0, 0, PADDED_ROWS - rows))
        return torch._int_mm(padded, weight.t())[:rows]

    return _scaled_after(shape, product)


def _bf16(shape: Shape, device: Device) -> Callable[..., Any]:
    return _scaled_after(shape, rounded_products if device.kind == "cpu" else products(device))


def no_bf16(shape: Shape, device: Device) -> str:
    """Return why a bf16 product is too coarse, or "": a CPU rounds it to bf16 before the scales apply."""
    coarse = device.kind == "cpu" and shape.outdtype != "bf16"
    return f"rounds to bf16 on a CPU, too coarse for {shape.outdtype}" if coarse else ""


def _float32(shape: Shape, device: Device) -> Callable[..., Any]:
    return _scaled_after(shape, products(device, narrow=False))


def _native(shape: Shape, device: Device) -> str:
    if device.kind == "cpu":
        return family.first(shape, device, "int_mm", "float32")
    by_row = cublas_scales(device) and shape.scale == "tensor" and shape.outdtype == "fp32"  # see scaled_float32
    scaled = ("scaled_mm_rows", "scaled_mm") if by_row else ("scaled_mm", "scaled_mm_rows")
    return family.first(shape, device, "int_mm", "int_mm_padded", *scaled, "bf16")


family = Family(
    MappingProxyType(
        {
            "scaled_mm": Route(_scaled_mm(False), _no_scaled_mm),
            "scaled_mm_fast": Route(_scaled_mm(True), _no_fast),
            "scaled_mm_rows": Route(_scaled_mm_rows, no_fp8),
            "int_mm": Route(_int_mm, _no_int_rows),
            "int_mm_padded": Route(_int_mm_padded, _no_int_padded),
            "bf16": Route(_bf16, no_bf16),
            "float32": Route(_float32),
        }
    ),
    _native,
)
