"""The bases of vLLM's kernels for scales of the tensor, of tokens and of channels, as far as they are not the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey


@dataclass
class Int8ScaledMMLinearLayerConfig:
    """An int8 layer."""

    is_static_input_scheme: bool
    is_channelwise: bool
    input_symmetric: bool


@dataclass
class FP8ScaledMMLinearLayerConfig:
    """An fp8 layer."""

    weight_quant_key: QuantKey
    activation_quant_key: QuantKey
    weight_shape: tuple[int, int]
    input_dtype: torch.dtype
    out_dtype: torch.dtype


def quantised(x: torch.Tensor, scale: torch.Tensor | None, columns: int, by_token: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] in e4m3fn and its scales: that given, one a token, one for so many columns, or one in all."""
    most = torch.finfo(torch.float8_e4m3fn).max
    groups = x.float().unflatten(-1, (-1, columns)) if columns > 1 else x.float()[:, None]
    if scale is None:
        top = groups.abs().amax(-1) if by_token or columns > 1 else groups.abs().amax().reshape(1, 1)
        scale = top.clamp(min=1e-10) / most
    wide = scale[..., None] if scale.dim() == 2 else scale
    return (groups / wide).clamp(-most, most).reshape(x.shape).to(torch.float8_e4m3fn), scale


class _Kernel:
    """What both kinds have."""

    def __init__(self, c: Any, layer_param_names: Sequence[str]) -> None:
        self.config, self.layer_param_names = c, layer_param_names

    def _get_layer_params(self, layer: Any) -> tuple[Any, ...]:
        return tuple(getattr(layer, name, None) for name in self.layer_param_names)


class Int8ScaledMMLinearKernel(_Kernel):
    """An int8 kernel."""


class FP8ScaledMMLinearKernel(_Kernel):
    """An fp8 kernel, whose operands arrive quantised."""

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] in 16 bits times the layer's weight, a view [K, N]."""
        weight, w_scale, x_scale, _ = self._get_layer_params(layer)
        rows = x.reshape(-1, x.shape[-1])
        q, x_scale = quantised(rows, x_scale, 1, self.config.activation_quant_key.scale.group_shape.is_per_token())
        shape = [*x.shape[:-1], weight.shape[1]]
        return self.apply_scaled_mm(A=q, B=weight, out_dtype=self.config.out_dtype, As=x_scale, Bs=w_scale, bias=bias, output_shape=shape)
