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
