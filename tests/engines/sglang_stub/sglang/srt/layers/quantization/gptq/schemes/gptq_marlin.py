"""GPTQ by Marlin."""

from __future__ import annotations

from typing import Any

import torch
from sglang.weights_alone import Marlin, codes_of, scaled


class GPTQMarlinLinearScheme(Marlin):
    """Codes along K, with or without act-order."""

    def __init__(self, quant_config: Any) -> None:
        self.quant_config = quant_config

    def decoded(self, layer: Any) -> torch.Tensor:
        """Return the weight [N, K]."""
        return scaled(codes_of(layer.qweight, 0).t(), layer.scales.t(), 8, layer.g_idx if self.quant_config.desc_act else None)
