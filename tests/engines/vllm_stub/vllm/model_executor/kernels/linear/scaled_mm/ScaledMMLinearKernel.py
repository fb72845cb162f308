"""The bases of vLLM's kernels for scales of the tensor, of tokens and of channels, without a
kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm import FORM
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey


@dataclass
class Int8ScaledMMLinearLayerConfig:
    """An int8 layer."""

    is_static_input_scheme: bool
    is_channelwise: bool
    input_symmetric: bool
    if FORM >= (0, 33):
        is_fused_module: bool = False


@dataclass
class FP8ScaledMMLinearLayerConfig:
    """An fp8 layer."""

    weight_quant_key: QuantKey
    activation_quant_key: QuantKey
    weight_shape: tuple[int, int]
    input_dtype: torch.dtype
    out_dtype: torch.dtype


class _Kernel:
    """What both kinds have."""

    def __init__(self, c: Any, layer_param_names: Sequence[str]) -> None:
        assert self.can_implement(c)[0] and self.is_supported()[0]
        self.config, self.layer_param_names = c, layer_param_names

    if FORM >= (0, 25):

        def input_quant_key(self) -> QuantKey | None:
            """Activations arrive in 16 bits."""
            return None

    def _get_layer_params(self, layer: Any) -> tuple[Any, ...]:
        return tuple(getattr(layer, name, None) for name in self.layer_param_names)


class Int8ScaledMMLinearKernel(_Kernel):
    """An int8 kernel."""


class FP8ScaledMMLinearKernel(_Kernel):
    """An fp8 kernel, whose operands arrive quantised."""

    def __init__(self, c: Any, layer_param_names: Sequence[str]) -> None:
        scale = c.activation_quant_key.scale
        self.quant_fp8 = QuantFP8(static=scale.static, group_shape=scale.group_shape, num_token_padding=self.get_output_padding())
        super().__init__(c, layer_param_names)

    def get_output_padding(self) -> int | None:
        """The least number of tokens, with some of which nothing is done."""
        return None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Nothing to do."""

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] in 16 bits times the layer's weight, a view [K, N]."""
        weight, w_scale, x_scale, _ = self._get_layer_params(layer)
        rows = x.reshape(-1, x.shape[-1])
        q, x_scale = self.quant_fp8(rows, x_scale, None)
        shape = [*x.shape[:-1], weight.shape[1]]
        return self.apply_scaled_mm(A=q, B=weight, out_dtype=self.config.out_dtype, As=x_scale, Bs=w_scale, bias=bias, output_shape=shape)
