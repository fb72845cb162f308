"""What vLLM's module of the same name offers for scales of blocks, by torch."""

from __future__ import annotations

import torch


def per_token_group_quant_fp8(x: torch.Tensor, group_size: int, eps: float = 1e-10) -> tuple[torch.Tensor, torch.Tensor]:
    """[M, K] in e4m3fn, and one scale for each group of a row."""
    most = torch.finfo(torch.float8_e4m3fn).max
    groups = x.float().view(*x.shape[:-1], -1, group_size)
    scale = groups.abs().amax(-1).clamp(min=eps) / most
    return (groups / scale[..., None]).view(x.shape).to(torch.float8_e4m3fn), scale
