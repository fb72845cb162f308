"""What vLLM's module of the same name offers for int8, by torch."""

from __future__ import annotations

import torch


def scaled_int8_quant(
    input: torch.Tensor, scale: torch.Tensor | None = None, azp: torch.Tensor | None = None, symmetric: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """[M, K] in int8, its scale, the one given or one a row [M, 1], and no zero point."""
    assert symmetric and azp is None
    scale = input.abs().float().amax(1, keepdim=True) / 127 if scale is None else scale
    return (input.float() / scale).round().clamp(-128, 127).to(torch.int8), scale, None


onednn_scaled_int8_quant = scaled_int8_quant


def cutlass_scaled_mm(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """a [M, K] times b [K, N] with scales of rows and columns, or of all."""
    assert not b.is_contiguous()  # CUTLASS wants columns of b one after the other
    out = (a.float() * scale_a) @ (b.float() * scale_b.reshape(1, -1))
    return (out if bias is None else out + bias).to(out_dtype)
