"""The method of vLLM's embeddings, which also makes the logits."""

from __future__ import annotations

import torch


class UnquantizedEmbeddingMethod:
    """Looks up, and multiplies by ``F.linear`` for the logits."""

    def create_weights(self, layer: torch.nn.Module, *sizes: object, **attributes: object) -> None:
        """Nothing to do: the layers of tests bring their weights."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing to do."""

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] times the layer's weight [N, K]."""
        layer.asked = getattr(layer, "asked", 0) + 1
        return torch.nn.functional.linear(x, layer.weight, bias)
