"""Integers of compressed-tensors by Marlin."""

from __future__ import annotations

from typing import Any

import torch
from sglang.weights_alone import Marlin, codes_of, scaled


class CompressedTensorsWNA16(Marlin):
    """Codes along K of rows."""

    def __init__(self, num_bits: int, group_size: int, symmetric: bool, has_g_idx: bool = False) -> None:
        self.pack_factor, self.group_size, self.symmetric, self.has_g_idx = 32 // num_bits, group_size, symmetric, has_g_idx

    def decoded(self, layer: Any) -> torch.Tensor:
        """Return the weight [N, K]."""
        return scaled(codes_of(layer.weight_packed, 1), layer.weight_scale, 8 if self.symmetric else codes_of(layer.weight_zero_point, 0))
