"""vLLM's linear kernels by platform, in order of preference, and how a layer gets one."""

from __future__ import annotations

from typing import Any

import torch
from vllm import _custom_ops
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    FP8ScaledMMLinearKernel,
    FP8ScaledMMLinearLayerConfig,
    Int8ScaledMMLinearKernel,
    Int8ScaledMMLinearLayerConfig,
)
from vllm.model_executor.layers.quantization.utils.w8a8_utils import convert_to_channelwise
from vllm.platforms import current_platform


class OwnFp8(FP8ScaledMMLinearKernel):
    """vLLM's own of fp8, by torch."""

    #: calls so far
    calls = 0

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Everywhere."""
        return True, None

    can_implement = is_supported

    def input_quant_key(self) -> None:
        """Activations arrive in 16 bits."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Nothing to do."""

    def apply_scaled_mm(self, *, A: Any, B: Any, out_dtype: Any, As: Any, Bs: Any, bias: Any, output_shape: list[int]) -> torch.Tensor:
        """A [M, K] times B [K, N]."""
        OwnFp8.calls += 1
        out = (A.float() * As) @ (B.float() * Bs.reshape(1, -1))
        return (out if bias is None else out + bias).to(out_dtype).view(*output_shape)


class CutlassInt8ScaledMMLinearKernel(Int8ScaledMMLinearKernel):
    """vLLM's own of int8: its weight is a view [K, N]."""

    is_supported = can_implement = OwnFp8.is_supported

    def process_weights_after_loading(self, layer: Any) -> None:
        """One scale a row where layers were fused, one for all of x where it is static."""
        weight, scale, x_scale = (getattr(layer, name) for name in self.layer_param_names[:3])
        if len(layer.logical_widths) > 1 and not self.config.is_channelwise:
            scale = convert_to_channelwise(scale, layer.logical_widths)
        layer.weight = torch.nn.Parameter(weight.data.t(), requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(scale.data, requires_grad=False)
        if self.config.is_static_input_scheme:
            layer.input_scale = torch.nn.Parameter(x_scale.data.max(), requires_grad=False)

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [M, K] times what the weight stands for."""
        weight, scale, x_scale, *_ = self._get_layer_params(layer)
        q, x_scale, _ = _custom_ops.scaled_int8_quant(x, x_scale)
        return _custom_ops.cutlass_scaled_mm(q, weight, x_scale, scale, x.dtype, bias)


_POSSIBLE_INT8_KERNELS: dict[Any, list[Any]] = {"any": [CutlassInt8ScaledMMLinearKernel]}
_POSSIBLE_FP8_KERNELS: dict[Any, list[Any]] = {"any": [OwnFp8]}
_POSSIBLE_FP8_BLOCK_KERNELS: dict[Any, list[Any]] = {"any": [OwnFp8]}
_NAMES = ["weight", "weight_scale", "input_scale", "input_scale_ub"]


def is_supported_and_can_implement_kernel(kernel: Any, config: Any, compute_capability: int | None) -> tuple[bool, str]:
    """Whether a kernel runs here and takes the layer."""
    for answer in (kernel.is_supported(compute_capability), kernel.can_implement(config)):
        if not answer[0]:
            return False, str(answer[1])
    return True, ""


def _chosen(config: Any, kernels: dict[Any, list[Any]]) -> Any:
    return next(one for one in kernels[current_platform._enum] if is_supported_and_can_implement_kernel(one, config, None)[0])


def init_fp8_linear_kernel(
    activation_quant_key: Any, weight_quant_key: Any, input_dtype: torch.dtype, out_dtype: torch.dtype, weight_shape: tuple[int, int]
) -> Any:
    """The kernel of an fp8 layer."""
    config = FP8ScaledMMLinearLayerConfig(weight_quant_key, activation_quant_key, weight_shape, input_dtype, out_dtype)
    if activation_quant_key.scale.group_shape.is_per_group():
        found = _chosen(config, _POSSIBLE_FP8_BLOCK_KERNELS)
        return found(config, _NAMES) if issubclass(found, FP8ScaledMMLinearKernel) else found(config)
    return _chosen(config, _POSSIBLE_FP8_KERNELS)(config, _NAMES)


def init_int8_linear_kernel(is_channelwise: bool, is_static_input_scheme: bool, input_symmetric: bool, module_name: str) -> Any:
    """The kernel of an int8 layer."""
    del module_name
    config = Int8ScaledMMLinearLayerConfig(is_static_input_scheme, is_channelwise, input_symmetric)
    names = ["weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj"]
    return _chosen(config, _POSSIBLE_INT8_KERNELS)(config, names)
