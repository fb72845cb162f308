"""The exact product that references are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: Multiplications up to which float64 is quick.
SMALL = 1 << 30
#: Weight elements converted at a time: 1 GiB in float32.
_CHUNK = 1 << 28


def exact_dtype(m: int, n: int, k: int) -> torch.dtype:
    """float64 where that is quick, else float32."""
    import torch

    return torch.float64 if m * n * k <= SMALL else torch.float32


def exact_product(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x[..., M, K] @ weight[..., N, K].T`` in *dtype* (float32 or float64), without TF32, on the operands' device.

    Both have the same number of dimensions, two or three.
    """
    import torch

    n, k = weight.shape[-2:]
    out = torch.empty(*x.shape[:-1], n, dtype=dtype, device=x.device)
    rows = max(1, _CHUNK // max(1, k * (weight.shape[0] if weight.dim() == 3 else 1)))
    tf32, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    try:
        wide = x.to(dtype)
        for start in range(0, n, rows):
            out[..., start : start + rows] = wide @ weight[..., start : start + rows, :].to(dtype).transpose(-1, -2)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
    return out
