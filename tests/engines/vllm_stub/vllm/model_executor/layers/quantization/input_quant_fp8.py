"""Quantisation of activations to e4m3fn."""

from __future__ import annotations

from typing import Any

import torch


class QuantFP8:
    """One scale a token, for some columns of a token, or for all; the one given where it is static."""

    def __init__(self, static: bool, group_shape: Any, num_token_padding: int | None = None) -> None:
        self.static, self.group_shape, self.padding = static, group_shape, num_token_padding

    def __call__(self, x: torch.Tensor, scale: torch.Tensor | None = None, scale_ub: None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """x [M, K] in e4m3fn, with more rows where it is padded, and its scales."""
        del scale_ub
        assert (scale is not None) == self.static
        most = torch.finfo(torch.float8_e4m3fn).max
        columns, by_token = self.group_shape.col, self.group_shape.is_per_token()
        if self.padding is not None and len(x) < self.padding:
            x = torch.nn.functional.pad(x, (0, 0, 0, self.padding - len(x)))
        groups = x.float().unflatten(-1, (-1, columns)) if columns > 1 else x.float()[:, None]
        if scale is None:
            top = groups.abs().amax(-1) if by_token or columns > 1 else groups.abs().amax().reshape(1, 1)
            scale = top.clamp(min=1e-10) / most
        wide = scale[..., None] if scale.dim() == 2 else scale
        return (groups / wide).clamp(-most, most).reshape(x.shape).to(torch.float8_e4m3fn), scale
