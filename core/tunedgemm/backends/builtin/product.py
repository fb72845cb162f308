"""Products of values that bf16 holds exactly (int8, fp8, fp4), and limits of torch's fp8 products.

The operands of these products are exact in bf16 and therefore in TF32, too. Whatever precision a
process chooses for float32 products, only the order of summation differs. Scales are applied
afterwards, in float32.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tunedgemm.architectures import ARCHITECTURES
from tunedgemm.device import Device
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch


def capability(device: Device) -> int:
    """Return 90 for ``sm_90``; 0 for devices of other vendors."""
    match = re.fullmatch(r"sm_(\d+)", device.gfx)
    return int(match[1]) if match else 0


def has_cuda(device: Device, major: int, minor: int) -> bool:
    """Check that CUDA has this version or a newer one; an unknown version counts as newer."""
    match = re.match(r"(\d+)\.(\d+)", dict(device.versions).get("cuda", ""))
    return match is None or (int(match[1]), int(match[2])) >= (major, minor)


def cublas_scales(device: Device) -> bool:
    """Tell whether `torch._scaled_mm` passes vectors of scales to cuBLASLt.

    It does on sm_90 with CUDA 12.9 or newer. One scale a row then gives fp16 and float32, too,
    where CUTLASS gives bf16 alone, and block scales are available.
    """
    return capability(device) == 90 and has_cuda(device, 12, 9)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return scales or matrices that begin at a multiple of 16 bytes, copied where they do not.

    cuBLASLt and grouped products need that.
    """
    return tensor if tensor.dim() == 0 or tensor.data_ptr() % 16 == 0 else tensor.clone()


def scaled_float32(m: int, n: int, device: Device) -> Callable[..., torch.Tensor]:
    """Return a function from fp8 x [M, K], weight [N, K] and their scales to their product in float32.

    The scales are one value or one a row. One a row is more exact on sm_90: cuBLASLt then
    accumulates Hopper's short sums in float32. The error is 1.5e-4 of a row, against 3.5e-4 with
    one scale a tensor, measured.
    """
    import torch

    def by_row(x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
        left, right = x_scale.reshape(-1, 1).expand(m, 1).contiguous(), w_scale.reshape(1, -1).expand(1, n).contiguous()
        return torch._scaled_mm(x, weight.t(), aligned(left), aligned(right), out_dtype=torch.float32)

    def after(x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
        unit_scale = torch.ones((), dtype=torch.float32, device=x.device)
        out = torch._scaled_mm(x, weight.t(), unit_scale, unit_scale, out_dtype=torch.float32)
        return out.mul_(x_scale.reshape(-1, 1)).mul_(w_scale.reshape(1, -1))

    return by_row if cublas_scales(device) else after


def no_fp8(shape: Shape, device: Device) -> str:
    """Return why `torch._scaled_mm` cannot multiply [M, K] by [K, N] with one scale each; "" where it can."""
    if not shape.dtype.startswith("fp8"):
        return f"multiplies fp8, not {shape.dtype}"
    if device.kind == "cpu":
        return "" if cpu_scaled_mm() else "needs a torch with fp8 products on a CPU"
    known = ARCHITECTURES.get(device.gfx)
    if known is None or shape.dtype != known.fp8:
        return f"does not multiply {shape.dtype} on {device.gfx}"
    if shape.n % 16 or shape.k % 16:
        return f"needs N and K divisible by 16 (N={shape.n}, K={shape.k})"
    return ""


@functools.cache
def cpu_scaled_mm() -> bool:
    """Tell whether this torch multiplies fp8 on a CPU with one scale a row, by trying."""
    import torch

    ones = torch.ones(16, 16).to(torch.float8_e4m3fn)
    row = torch.full((16, 1), 2.0)
    try:
        out = torch._scaled_mm(ones, ones.t(), row, row.t(), out_dtype=torch.float32)
    except (RuntimeError, NotImplementedError):
        return False
    return bool((out == 64).all())


def products(device: Device, *, narrow: bool = True) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a function from x [M, K] and weight [N, K] to their product in float32; both may be batched.

    Args:
        narrow: multiply in fp16, or else in bf16, where that has a float32 result, else in float32.
    """
    import torch

    def of_16_bits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        left, right = _in_16_bits(x), _in_16_bits(weight).transpose(-1, -2)
        return torch.mm(left, right, out_dtype=torch.float32) if x.dim() == 2 else torch.bmm(left, right, out_dtype=torch.float32)

    def of_float32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x.to(torch.float32), weight.to(torch.float32).transpose(-1, -2))

    return of_16_bits if narrow and device.kind != "cpu" else of_float32


def rounded_products(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply in fp16 or else in bf16 with a result of its dtype, back in float32, as a CPU does."""
    import torch

    return torch.matmul(_in_16_bits(x), _in_16_bits(weight).transpose(-1, -2)).to(torch.float32)


def _in_16_bits(values: torch.Tensor) -> torch.Tensor:
    """Return values of fp16 unchanged, and others in bf16."""
    import torch

    return values if values.dtype is torch.float16 else values.to(torch.bfloat16)


def is_differentiated(tensor: torch.Tensor) -> bool:
    """Check for a gradient or a tangent that a result must keep."""
    import torch
    from torch.autograd import forward_ad

    if tensor.requires_grad and torch.is_grad_enabled():
        return True
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def rescale(product: torch.Tensor, by_row: torch.Tensor, by_column: torch.Tensor, bias: Any, dtype: torch.dtype) -> torch.Tensor:
    """Scale a float32 or int32 product by rows and columns, add the bias in float32, and round once.

    A float32 product is overwritten.
    """
    import torch

    out = product.mul_(by_row) if product.dtype is torch.float32 else product * by_row
    if bias is None and dtype is not torch.float32 and not (is_differentiated(out) or is_differentiated(by_column)):
        return torch.mul(out, by_column, out=torch.empty(out.shape, dtype=dtype, device=out.device))
    return finish(out.mul_(by_column), bias, dtype, tuple(out.shape))


def finish(out: torch.Tensor, bias: Any, dtype: torch.dtype, size: tuple[int, ...]) -> torch.Tensor:
    """Add a bias to a float32 result, round it once, and reshape it.

    The result is overwritten.
    """
    out = out if bias is None else out.add_(bias)
    return out.to(dtype).view(size)
