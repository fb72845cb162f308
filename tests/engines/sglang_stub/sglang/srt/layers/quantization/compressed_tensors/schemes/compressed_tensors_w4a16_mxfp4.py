"""mxfp4 of compressed-tensors by Marlin."""

from __future__ import annotations

from typing import Any

import torch
from sglang.weights_alone import Marlin, e2m1


class CompressedTensorsW4A16Mxfp4(Marlin):
    """Pairs along K, with bytes of e8m0."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Repack the layer, whose loaded weight goes."""
        super().process_weights_after_loading(layer)
        del layer.weight_packed

    def decoded(self, layer: Any) -> torch.Tensor:
        """Return the weight [N, K]."""
        return e2m1(layer.weight_packed, 2.0 ** (layer.weight_scale.float() - 127))
