"""The base of vLLM's kernels for scales of blocks, without a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm import FORM
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8


@dataclass
class FP8BlockParams:
    """A layer's weight and scales."""

    weight: torch.Tensor
    weight_scale_inv: torch.Tensor
    WEIGHT: ClassVar[str] = "weight"


class Fp8BlockScaledMMLinearKernel:
    """An fp8 kernel, whose operands arrive quantised unless it does so itself."""

    apply_input_quant: ClassVar[bool] = True

    def __init__(self, config: Any) -> None:
        self.config = config
        scale = config.activation_quant_key.scale
        self.quant_fp8 = QuantFP8(static=scale.static, group_shape=scale.group_shape, num_token_padding=None)

    if FORM >= (0, 25):

        def input_quant_key(self) -> None:
            """Activations arrive in 16 bits."""

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        """Dynamic scales."""
        static = config.activation_quant_key.scale.static
        return not static, "static scales" if static else None

    def _get_layer_params(self, layer: Any) -> FP8BlockParams:
        return FP8BlockParams(layer.weight, layer.weight_scale_inv)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Nothing to do."""

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] in 16 bits times the layer's weight [N, K]."""
        params = self._get_layer_params(layer)
        rows = x.reshape(-1, x.shape[-1])
        q, scale = self.quant_fp8(rows, None, None) if self.apply_input_quant else (rows, rows.new_empty(1))
        out = self.apply_block_scaled_mm(A=q, B=params.weight, As=scale, Bs=params.weight_scale_inv)
        out = out if bias is None else out + bias
        return out.to(self.config.out_dtype).view(*x.shape[:-1], params.weight.shape[0])
