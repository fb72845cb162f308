"""What vLLM's module of the same name offers for fp8, by torch."""

from __future__ import annotations

import torch


def scaled_fp8_quant(
    input: torch.Tensor, scale: torch.Tensor | None = None, num_token_padding: int | None = None, *, use_per_token_if_dynamic: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """[M, K] in e4m3fn, and its scale: the one given, one a row [M, 1], or one [1]."""
    most = torch.finfo(torch.float8_e4m3fn).max
    if scale is None:
        top = input.abs().float()
        scale = (top.amax(1, keepdim=True) if use_per_token_if_dynamic else top.amax().view(1)) / most
    return (input.float() / scale).clamp(-most, most).to(torch.float8_e4m3fn), scale
