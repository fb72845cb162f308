"""Products of values that bf16 holds exactly, such as int8, fp8 and fp4, and what torch's fp8 products ask for.

The operands of these products are exact in bf16 and therefore in TF32, too: whatever a process has
chosen for products of float32, only the order of summation differs. Scales are multiplied in
afterwards, in float32.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tunedgemm.device import Device
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch

#: The fp8 dtype of e4m3 that an AMD architecture multiplies.
_AMD_FP8 = {"gfx942": ("fp8_e4m3fnuz",), "gfx950": ("fp8_e4m3fn",)}


def capability(device: Device) -> int:
    """90 for ``sm_90``; 0 for what is no NVIDIA device."""
    found = re.fullmatch(r"sm_(\d+)", device.gfx)
    return int(found[1]) if found else 0


def cublas_scales(device: Device) -> bool:
    """Whether `torch._scaled_mm` takes vectors of scales to cuBLASLt: on sm_90 with CUDA 12.9 or newer; a version not told is newer.

    Then one scale a row gives fp16 and float32, too, where CUTLASS gives bf16 alone, and there are
    scales of blocks.
    """
    found = re.match(r"(\d+)\.(\d+)", dict(device.versions).get("cuda", ""))
    return capability(device) == 90 and (found is None or (int(found[1]), int(found[2])) >= (12, 9))


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Scales or matrices that begin at a multiple of 16 bytes, as cuBLASLt and grouped products need: a copy where these do not."""
    return tensor if tensor.dim() == 0 or tensor.data_ptr() % 16 == 0 else tensor.clone()


def scaled_float32(m: int, n: int, device: Device) -> Callable[..., torch.Tensor]:
    """A function of fp8 x [M, K], weight [N, K] and their scales, of one value or one a row, to their product in float32.

    One scale a row is more exact on sm_90: cuBLASLt then adds Hopper's short sums up in float32
    (1.5e-4 of a row measured where one scale a tensor has 3.5e-4).
    """
    import torch

    def by_row(x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
        left, right = x_scale.reshape(-1, 1).expand(m, 1).contiguous(), w_scale.reshape(1, -1).expand(1, n).contiguous()
        return torch._scaled_mm(x, weight.t(), aligned(left), aligned(right), out_dtype=torch.float32)

    def after(x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
        one = torch.ones((), dtype=torch.float32, device=x.device)
        out = torch._scaled_mm(x, weight.t(), one, one, out_dtype=torch.float32)
        return out.mul_(x_scale.reshape(-1, 1)).mul_(w_scale.reshape(1, -1))

    return by_row if cublas_scales(device) else after


def no_fp8(shape: Shape, device: Device) -> str:
    """Why `torch._scaled_mm` cannot multiply [M, K] by [K, N] there, one value scaling each operand; "" where it can."""
    if not shape.dtype.startswith("fp8"):
        return f"multiplies fp8, not {shape.dtype}"
    if device.kind == "cpu":
        return "" if cpu_scaled_mm() else "is no product of this torch on a CPU"
    known = _AMD_FP8.get(device.gfx, ()) if device.kind == "amd" else ("fp8_e4m3fn",) * (capability(device) >= 89)
    if shape.dtype not in known:
        return f"multiplies no {shape.dtype} on {device.gfx}"
    if shape.n % 16 or shape.k % 16:
        return f"needs N and K divisible by 16 (N={shape.n}, K={shape.k})"
    return ""


@functools.cache
def cpu_scaled_mm() -> bool:
    """Whether this torch multiplies fp8 on a CPU with one scale a row, found by doing so."""
    import torch

    ones = torch.ones(16, 16).to(torch.float8_e4m3fn)
    row = torch.full((16, 1), 2.0)
    try:
        out = torch._scaled_mm(ones, ones.t(), row, row.t(), out_dtype=torch.float32)
    except (RuntimeError, NotImplementedError):
        return False
    return bool((out == 64).all())


def products(device: Device, *, narrow: bool = True) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A function of x [M, K] and weight [N, K], or [B, M, K] and [B, N, K], to their product in float32.

    Args:
        narrow: multiply in bf16 where its product has a float32 result, else in float32.
    """
    import torch

    def of_bf16(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        left, right = x.to(torch.bfloat16), weight.to(torch.bfloat16).transpose(-1, -2)
        return torch.mm(left, right, out_dtype=torch.float32) if x.dim() == 2 else torch.bmm(left, right, out_dtype=torch.float32)

    def of_float32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x.to(torch.float32), weight.to(torch.float32).transpose(-1, -2))

    return of_bf16 if narrow and device.kind != "cpu" else of_float32


def rounded_products(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product in bf16 with a bf16 result, back in float32: what a CPU has."""
    import torch

    return torch.matmul(x.to(torch.bfloat16), weight.to(torch.bfloat16).transpose(-1, -2)).to(torch.float32)


def rescaled(product: torch.Tensor, by_row: torch.Tensor, by_column: torch.Tensor, bias: Any, dtype: torch.dtype) -> torch.Tensor:
    """A product of our own, float32 or int32, times the scales of its rows and columns, plus the bias; in float32, then rounded once."""
    import torch

    out = product.mul_(by_row) if product.dtype is torch.float32 else product * by_row
    keeps_gradients = out.requires_grad or by_column.requires_grad
    if bias is None and dtype is not torch.float32 and not keeps_gradients:
        return torch.mul(out, by_column, out=torch.empty(out.shape, dtype=dtype, device=out.device))
    return finished(out.mul_(by_column), bias, dtype, tuple(out.shape))


def finished(out: torch.Tensor, bias: Any, dtype: torch.dtype, size: tuple[int, ...]) -> torch.Tensor:
    """A float32 result of our own with its bias added, rounded once, in the form asked for."""
    out = out if bias is None else out.add_(bias)
    return out.to(dtype).view(size)
