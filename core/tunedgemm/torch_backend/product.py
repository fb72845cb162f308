"""Products of values that bf16 holds exactly, such as int8, fp8 and fp4, and what torch's fp8 products ask for.

The operands of these products are exact in bf16 and therefore in TF32, too: whatever a process has chosen for products of
float32, only the order of summation differs. Scales are multiplied in afterwards, in float32.
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


def finished(out: torch.Tensor, bias: Any, dtype: torch.dtype, size: tuple[int, ...]) -> torch.Tensor:
    """A float32 result of our own with its bias added, rounded once, in the form asked for."""
    out = out if bias is None else out.add_(bias)
    return out.to(dtype).view(size)
