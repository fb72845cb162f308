"""nvfp4 of compressed-tensors by Marlin."""

from __future__ import annotations

from typing import Any

import torch
from sglang.weights_alone import Marlin, e2m1


class CompressedTensorsW4A16Fp4(Marlin):
    """Pairs along K, with a global scale that divides."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Repack the layer, whose loaded parameters go."""
        super().process_weights_after_loading(layer)
        del layer.weight_packed, layer.weight_global_scale

    def decoded(self, layer: Any) -> torch.Tensor:
        """Return the weight [N, K]."""
        return e2m1(layer.weight_packed, layer.weight_scale.float() / layer.weight_global_scale.max())
