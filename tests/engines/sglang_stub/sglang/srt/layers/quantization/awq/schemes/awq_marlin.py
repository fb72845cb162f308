"""AWQ by Marlin."""

from __future__ import annotations

from typing import Any

import torch
from sglang.weights_alone import Marlin, codes_of, scaled

_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


class AWQMarlinLinearScheme(Marlin):
    """Codes along N, with zero points."""

    def __init__(self, quant_config: Any) -> None:
        self.quant_config = quant_config

    def decoded(self, layer: Any) -> torch.Tensor:
        """Return the weight [N, K]."""
        return scaled(codes_of(layer.qweight, 1, _ORDER).t(), layer.scales.t(), codes_of(layer.qzeros, 1, _ORDER).t())
