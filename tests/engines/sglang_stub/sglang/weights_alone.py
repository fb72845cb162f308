"""Shared by the schemes of weights alone: Marlin's repacking and product, by torch."""

from __future__ import annotations

from typing import Any

import torch

#: M of each product that SGLang multiplied itself.
multiplied: list[int] = []


def codes_of(words: torch.Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Unpack eight codes along a dimension, of which the one at a place has bits from 4 * order[place]."""
    return torch.stack([(words >> 4 * place) & 15 for place in order], dim + 1).flatten(dim, dim + 1)


class Marlin:
    """A scheme that keeps a decoded weight, as another layout."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Repack the layer once."""
        assert not hasattr(layer, "workspace")
        layer.workspace = torch.nn.Parameter(self.decoded(layer), requires_grad=False)

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply x [..., K]."""
        multiplied.append(x.numel() // x.shape[-1])
        out = x.float() @ layer.workspace.t()
        return (out if bias is None else out + bias).to(x.dtype)

    def decoded(self, layer: Any) -> torch.Tensor:
        """Return the weight [N, K]."""
        raise NotImplementedError


def scaled(codes: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor | int, index: torch.Tensor | None = None) -> torch.Tensor:
    """Scale codes [N, K] by scales [N, groups]."""
    index = torch.arange(codes.shape[1]) // (codes.shape[1] // scale.shape[1]) if index is None else index.long()
    return (codes - (zeros if isinstance(zeros, int) else zeros[:, index])) * scale[:, index].float()


def e2m1(pairs: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Scale the values [N, K] of pairs of e2m1, the lowest first, by scales [N, groups]."""
    codes = torch.stack([pairs & 15, pairs >> 4], -1).flatten(1).int()
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])[codes & 7] * (1 - 2 * (codes >> 3))
    return values * scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)


class Method:
    """The method of a layer, which asks its scheme."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Let the scheme repack."""
        layer.scheme.process_weights_after_loading(layer)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Let the scheme multiply."""
        out: torch.Tensor = layer.scheme.apply_weights(layer, x, bias)
        return out
