"""Scales of layers that were fused."""

from __future__ import annotations

import torch


def convert_to_channelwise(weight_scale: torch.Tensor, logical_widths: list[int]) -> torch.Tensor:
    """One scale for each of some matrices to one [N, 1] for each of their rows."""
    return torch.repeat_interleave(weight_scale.reshape(-1), torch.tensor(logical_widths)).reshape(-1, 1)
