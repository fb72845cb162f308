"""The method of vLLM's linear layers whose weights are not quantised."""

from __future__ import annotations

import torch


class UnquantizedLinearMethod:
    """Multiplies by ``F.linear``, as vLLM does on GPUs."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing to do."""

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] times the layer's weight [N, K]."""
        layer.asked = getattr(layer, "asked", 0) + 1
        return torch.nn.functional.linear(x, layer.weight, bias)
