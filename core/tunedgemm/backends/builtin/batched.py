"""Routes of batched_bf16 and batched_a8w8: B GEMMs of equal size.

Launcher operands: x [B, M, K], weight [B, N, K]. Then batched_a8w8 has x_scale of B x M values and
w_scale of B x N values; batched_bf16 has bias [B, N] or [B, 1, N], or none.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tunedgemm.backends.builtin.a8w8 import INT_ROWS, PADDED_ROWS, no_bf16, no_int
from tunedgemm.backends.builtin.product import (
    aligned,
    capability,
    cublas_scales,
    finish,
    no_fp8,
    products,
    rescale,
    rounded_products,
)
from tunedgemm.backends.builtin.route import Family, Route
from tunedgemm.device import Device
from tunedgemm.dtype import torch_dtype
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch

#: Largest B for a loop of GEMMs.
_LOOPS = 64
#: Bytes of one GEMM's operands from which a launch per GEMM is cheaper than converting to bf16.
_WIDE = 1 << 21


def _plain(shape: Shape) -> bool:
    """Tell whether input, bias and output have one dtype."""
    return shape.outdtype == shape.dtype and shape.bias_dtype in ("", shape.dtype)


def _unfit(shape: Shape, device: Device) -> str:
    del device
    return "" if _plain(shape) else f"needs bias and output in {shape.dtype} (bias {shape.bias_dtype or 'none'}, output {shape.outdtype})"


def _bmm(shape: Shape, device: Device) -> Callable[..., Any]:
    """Compute bmm, then add the bias; in float32 until the end for another output dtype."""
    import torch

    n, out_dtype, plain = shape.n, torch_dtype(shape.outdtype), _plain(shape)
    fused = device.kind != "cpu"

    def bmm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        right = weight.transpose(1, 2)
        if plain:
            out = torch.bmm(x, right)
        else:
            out = torch.bmm(x, right, out_dtype=torch.float32) if fused else torch.bmm(x.float(), right.float())
        return finish(out, None if bias is None else bias.view(-1, 1, n), out_dtype, tuple(out.shape))

    return bmm


def _baddbmm(shape: Shape, device: Device) -> Callable[..., Any]:
    import torch

    del device
    n = shape.n

    def baddbmm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.baddbmm(bias.view(-1, 1, n), x, weight.transpose(1, 2))

    return baddbmm


def _no_baddbmm(shape: Shape, device: Device) -> str:
    return _unfit(shape, device) or ("" if shape.bias else "needs a bias")


def _mm_loop(shape: Shape, device: Device) -> Callable[..., Any]:
    """Compute the GEMMs one by one, each into its part of the output."""
    import torch

    del device
    n = shape.n

    def mm_loop(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device=x.device)
        added = None if bias is None else bias.view(-1, n)
        for batch, target in enumerate(out):
            if added is None:
                torch.mm(x[batch], weight[batch].t(), out=target)
            else:
                torch.addmm(added[batch], x[batch], weight[batch].t(), out=target)
        return out

    return mm_loop


def _looped(shape: Shape, device: Device) -> tuple[int, ...]:
    del device
    return (0,) if int(shape["B"]) <= _LOOPS else ()


def _grouped_mm(shape: Shape, device: Device) -> Callable[..., Any]:
    import torch

    del device
    n = shape.n

    def grouped_mm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = torch._grouped_mm(x, weight.transpose(1, 2))
        return out if bias is None else out.add_(bias.view(-1, 1, n))

    return grouped_mm


def _no_grouped_mm(shape: Shape, device: Device) -> str:
    if capability(device) not in (90, 100) or shape.dtype != "bf16":
        return f"is the same as bmm for {shape.dtype} on {device.gfx}"
    if shape.n % 8 or shape.k % 8:
        return f"needs N and K divisible by 8 (N={shape.n}, K={shape.k})"
    return _unfit(shape, device)


floats = Family(
    MappingProxyType(
        {
            "bmm": Route(_bmm),
            "baddbmm": Route(_baddbmm, _no_baddbmm),
            "grouped_mm": Route(_grouped_mm, _no_grouped_mm),
            "mm_loop": Route(_mm_loop, _unfit, _looped),
        }
    ),
    lambda shape, device: "baddbmm" if shape.bias and not _unfit(shape, device) else "bmm",
)


def _scaled_after(shape: Shape, product: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Compute the values' products without rounding, then scale in float32 and round once."""
    n, out_dtype = shape.n, torch_dtype(shape.outdtype)

    def scaled(x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor, bias: Any = None) -> torch.Tensor:
        batch, rows = x.shape[:2]
        added = None if bias is None else bias.view(-1, 1, n)
        return rescale(product(x, weight), x_scale.reshape(batch, rows, 1), w_scale.reshape(batch, 1, n), added, out_dtype)

    return scaled


def _bf16(shape: Shape, device: Device) -> Callable[..., Any]:
    return _scaled_after(shape, rounded_products if device.kind == "cpu" else products(device))


def _float32(shape: Shape, device: Device) -> Callable[..., Any]:
    return _scaled_after(shape, products(device, narrow=False))


def _int_mm_loop(shape: Shape, device: Device) -> Callable[..., Any]:
    import torch

    rows, n, k = shape.m, shape.n, shape.k
    missing = PADDED_ROWS - rows if device.kind != "cpu" and rows <= INT_ROWS else 0

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x
        out = torch.empty(*padded.shape[:2], n, dtype=torch.int32, device=x.device)
        for left, right, target in zip(padded, weight, out, strict=True):
            # The view has a row's strides. A CPU's product misreads one row with those of a column.
            torch._int_mm(left.reshape(-1, k), right.t(), out=target)
        return out[:, :rows]

    return _scaled_after(shape, product)


def _scaled_mm_loop(shape: Shape, device: Device) -> Callable[..., Any]:
    import torch

    del device
    m, n, out_dtype = shape.m, shape.n, torch_dtype(shape.outdtype)

    def scaled_mm_loop(x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
        by_x, by_w = x_scale.reshape(-1, m, 1), w_scale.reshape(-1, 1, n)
        sets = zip(x, weight, map(aligned, by_x), map(aligned, by_w), strict=True)
        return torch.stack([torch._scaled_mm(left, right.t(), a, b, out_dtype=out_dtype) for left, right, a, b in sets])

    return scaled_mm_loop


def _no_scaled_mm(shape: Shape, device: Device) -> str:
    if reason := no_fp8(shape, device):
        return reason
    if shape.m == 1 and shape.n == 1:
        return "takes one value for one scale a tensor"
    if device.kind != "cpu" and shape.outdtype != "bf16" and not cublas_scales(device):
        return f"with one scale a row gives bf16, not {shape.outdtype}"
    return "adds no bias here" if shape.bias else ""


def _scaled_grouped_mm(shape: Shape, device: Device) -> Callable[..., Any]:
    import torch

    del device
    m, n = shape.m, shape.n

    def scaled_grouped_mm(x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
        return torch._scaled_grouped_mm(x, weight.transpose(1, 2), x_scale.reshape(-1, m), w_scale.reshape(-1, n), out_dtype=torch.bfloat16)

    return scaled_grouped_mm


def _no_scaled_grouped_mm(shape: Shape, device: Device) -> str:
    if capability(device) != 90:
        return f"is not available on {device.gfx}"
    return _no_scaled_mm(shape, device) or ("" if shape.outdtype == "bf16" else f"gives bf16, not {shape.outdtype}")


def _native(shape: Shape, device: Device) -> str:
    if device.kind == "cpu":
        return bytes_.first(shape, device, "int_mm_loop", "float32")
    loops = ("int_mm_loop", "scaled_mm_loop") if (shape.m + shape.n) * shape.k >= _WIDE else ()
    return bytes_.first(shape, device, "scaled_grouped_mm", *loops, "bf16")


bytes_ = Family(
    MappingProxyType(
        {
            "bf16": Route(_bf16, no_bf16),
            "scaled_grouped_mm": Route(_scaled_grouped_mm, _no_scaled_grouped_mm),
            "scaled_mm_loop": Route(_scaled_mm_loop, _no_scaled_mm, _looped),
            "int_mm_loop": Route(_int_mm_loop, no_int, _looped),
            "float32": Route(_float32),
        }
    ),
    _native,
)
