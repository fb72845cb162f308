"""nvfp4 of ModelOpt by Marlin."""

from __future__ import annotations

from typing import Any

import torch
from sglang.weights_alone import Marlin, e2m1


class ModelOptFp4LinearMethod:
    """Pairs along K, with a global scale that multiplies."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Repack the layer."""
        Marlin.process_weights_after_loading(self, layer)  # type: ignore[arg-type]

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply x [..., K]."""
        return Marlin.apply_weights(self, layer, x, bias)  # type: ignore[arg-type]

    def decoded(self, layer: Any) -> torch.Tensor:
        """Return the weight [N, K]."""
        return e2m1(layer.weight, layer.weight_scale.float() * layer.weight_scale_2.max())


class ModelOptNvFp4A16LinearMethod:
    """Checkpoints with activations of 16 bits."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Repack the layer."""
        Marlin.process_weights_after_loading(self, layer)  # type: ignore[arg-type]

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply x [..., K]."""
        return Marlin.apply_weights(self, layer, x, bias)  # type: ignore[arg-type]

    decoded = ModelOptFp4LinearMethod.decoded
