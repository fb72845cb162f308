"""The methods of layers whose weights are not quantised."""

from __future__ import annotations

import torch

#: M of each product that SGLang multiplied itself.
multiplied: list[int] = []


class UnquantizedEmbeddingMethod:
    """The method of embeddings and LM heads, whose logits `LogitsProcessor` computes."""


class UnquantizedLinearMethod:
    """Multiplies by ``F.linear``, as SGLang does on GPUs."""

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply x [..., K] by the layer's weight [N, K]."""
        multiplied.append(x.numel() // x.shape[-1])
        return torch.nn.functional.linear(x, layer.weight, bias)
