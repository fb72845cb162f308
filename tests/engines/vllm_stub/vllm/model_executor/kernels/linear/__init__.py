"""vLLM's linear kernels by platform, in order of preference, and how a layer gets one."""

from __future__ import annotations

import math
from typing import Any

import torch
from vllm import FORM, _custom_ops
from vllm.config import get_current_vllm_config
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    FP8ScaledMMLinearKernel,
    FP8ScaledMMLinearLayerConfig,
    Int8ScaledMMLinearKernel,
    Int8ScaledMMLinearLayerConfig,
)
from vllm.model_executor.kernels.linear.weights_alone import (
    CutlassNvFp4LinearKernel,
    MarlinLinearKernel,
    MarlinMxFp4LinearKernel,
    MarlinMxfp8LinearKernel,
    MarlinNvFp4LinearKernel,
    MPLinearLayerConfig,
    MxFp4LinearKernel,
    MxFp4LinearLayerConfig,
    Mxfp8LinearKernel,
    Mxfp8LinearLayerConfig,
    NvFp4LinearKernel,
    NvFp4LinearLayerConfig,
)
from vllm.model_executor.kernels.linear.weights_alone import (
    MPLinearKernel as MPLinearKernel,
)
from vllm.model_executor.layers.quantization.utils.w8a8_utils import convert_to_channelwise
from vllm.platforms import current_platform


class _OfTests:
    """A kernel that runs here while tests say so."""

    supported = True

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Whether tests have it so."""
        del compute_capability
        return cls.supported, None if cls.supported else "another device"

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        """Every layer."""
        del config
        return True, None


class CutlassFP8ScaledMMLinearKernel(_OfTests, FP8ScaledMMLinearKernel):
    """vLLM's own of fp8, by torch."""

    #: Numbers of tokens so far.
    calls: list[int] = []

    def apply_scaled_mm(self, *, A: Any, B: Any, out_dtype: Any, As: Any, Bs: Any, bias: Any, output_shape: list[int]) -> torch.Tensor:
        """A [M, K] times B [K, N]."""
        self.calls.append(len(A))
        out = ((A.float() * As) @ (B.float() * Bs.reshape(1, -1)))[: math.prod(output_shape[:-1])]
        return (out if bias is None else out + bias).to(out_dtype).view(*output_shape)


class PerTensorTorchFP8ScaledMMLinearKernel(CutlassFP8ScaledMMLinearKernel):
    """Takes more tokens than there are."""

    def get_output_padding(self) -> int:
        """Return the padding that vLLM uses outside of compiled graphs."""
        return 17


class MarlinFP8ScaledMMLinearKernel(_OfTests, FP8ScaledMMLinearKernel):
    """Takes activations of 16 bits, and weights in a special order."""

    supported = False

    def process_weights_after_loading(self, layer: Any) -> None:
        """Reorder the weight, whose shape stays."""
        layer.weight = torch.nn.Parameter(layer.weight.t().contiguous().view(torch.uint8).flip(0).view(layer.weight.dtype).t(), False)

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] times the layer's weight, a view [K, N]."""
        weight = layer.weight.t().view(torch.uint8).flip(0).view(layer.weight.dtype).float() * layer.weight_scale
        return torch.nn.functional.linear(x.float(), weight, bias).to(x.dtype)

    def apply_scaled_mm(self, **named: Any) -> torch.Tensor:
        """Never called."""
        raise NotImplementedError


class AiterHipbMMPerTokenFp8ScaledMMLinearKernel(MarlinFP8ScaledMMLinearKernel):
    """Shuffles the weight (0.25 and newer)."""


class TritonFp8BlockScaledMMKernel(_OfTests, Fp8BlockScaledMMLinearKernel):
    """vLLM's own of fp8 by blocks, by torch."""

    #: Numbers of tokens so far.
    calls: list[int] = []

    def apply_block_scaled_mm(self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor) -> torch.Tensor:
        """A [M, K] times B [N, K]."""
        self.calls.append(len(A))
        if not self.apply_input_quant:
            A, As = self.quant_fp8(A, None, None)
        wide = Bs.repeat_interleave(128, 0).repeat_interleave(128, 1)[: B.shape[0], : B.shape[1]]
        out = (A.float() * As.repeat_interleave(128, 1)[:, : A.shape[1]]) @ (B.float() * wide).t()
        return out.to(self.config.out_dtype)


class FlashInferFp8DeepGEMMDynamicBlockScaledKernel(TritonFp8BlockScaledMMKernel):
    """Takes activations of 16 bits."""

    supported = False
    apply_input_quant = False


class CutlassInt8ScaledMMLinearKernel(_OfTests, Int8ScaledMMLinearKernel):
    """vLLM's own of int8: its weight is a view [K, N]."""

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
_POSSIBLE_FP8_KERNELS: dict[Any, list[Any]] = {
    "any": [CutlassFP8ScaledMMLinearKernel, PerTensorTorchFP8ScaledMMLinearKernel, MarlinFP8ScaledMMLinearKernel]
}
if FORM >= (0, 25):
    _POSSIBLE_FP8_KERNELS["any"].insert(0, AiterHipbMMPerTokenFp8ScaledMMLinearKernel)
if FORM < (0, 33):
    _POSSIBLE_FP8_KERNELS["any"].insert(0, _POSSIBLE_FP8_KERNELS["any"].pop())
_POSSIBLE_FP8_BLOCK_KERNELS: dict[Any, list[Any]] = {
    "any": [FlashInferFp8DeepGEMMDynamicBlockScaledKernel, MarlinFP8ScaledMMLinearKernel, TritonFp8BlockScaledMMKernel]
}
if FORM >= (0, 25):
    _POSSIBLE_KERNELS: dict[Any, list[Any]] = {"any": [MarlinLinearKernel]}
    _POSSIBLE_NVFP4_KERNELS: dict[Any, list[Any]] = {"any": [CutlassNvFp4LinearKernel, MarlinNvFp4LinearKernel]}
    _POSSIBLE_MXFP8_KERNELS: dict[Any, list[Any]] = {"any": [MarlinMxfp8LinearKernel]}
    _POSSIBLE_MXFP4_KERNELS: dict[Any, list[Any]] = {"any": [MarlinMxFp4LinearKernel]}
_NAMES = ["weight", "weight_scale", "input_scale", "input_scale_ub"]


def is_supported_and_can_implement_kernel(kernel: Any, config: Any, compute_capability: int | None) -> tuple[bool, str]:
    """Whether a kernel runs here and takes the layer."""
    for answer in (kernel.is_supported(compute_capability), kernel.can_implement(config)):
        if not answer[0]:
            return False, str(answer[1])
    return True, ""


_LINEAR_BACKEND_KERNEL_MAP: dict[str, set[Any]] = {
    "cutlass": {CutlassFP8ScaledMMLinearKernel, CutlassInt8ScaledMMLinearKernel},
    "marlin": {MarlinLinearKernel, MarlinNvFp4LinearKernel, MarlinMxfp8LinearKernel, MarlinMxFp4LinearKernel},
    "triton": {TritonFp8BlockScaledMMKernel},
}


def _filter_kernels_by_backend(backend: str, kernels: list[Any]) -> list[Any]:
    """The kernels of a backend; where there are none, none (0.25) or all of them (0.33)."""
    found = [one for one in kernels if one in _LINEAR_BACKEND_KERNEL_MAP.get(backend, ())]
    return found or (list(kernels) if FORM >= (0, 33) else [])


if FORM >= (0, 33):

    def _resolve_backend_kernels(
        kernels: list[Any], layer_desc: str, *, quantization: str, compute_capability: int | None = None
    ) -> list[Any]:
        """The kernels among which a layer's is chosen."""
        del layer_desc, compute_capability
        settings = get_current_vllm_config().kernel_config
        backend = (settings.linear_backend_per_quant or {}).get(quantization) or settings.linear_backend
        return kernels if backend == "auto" else _filter_kernels_by_backend(backend, kernels)


def _possible(kernels: list[Any], quantization: str) -> list[Any]:
    if FORM >= (0, 33):
        return _resolve_backend_kernels(kernels, "scaled-mm", quantization=quantization)
    backend = getattr(get_current_vllm_config().kernel_config, "linear_backend", "auto")
    found = kernels if backend == "auto" else _filter_kernels_by_backend(backend, kernels)
    if not found:
        raise ValueError(f"--linear-backend={backend} was requested but no '{backend}' kernel exists for this layer type.")
    return found


def _chosen(config: Any, kernels: dict[Any, list[Any]], quantization: str) -> Any:
    possible = _possible(kernels[current_platform._enum], quantization)
    return next(one for one in possible if is_supported_and_can_implement_kernel(one, config, None)[0])


def init_fp8_linear_kernel(
    activation_quant_key: Any, weight_quant_key: Any, input_dtype: torch.dtype, out_dtype: torch.dtype, weight_shape: tuple[int, int],
    force_kernel: Any = None, module_name: str | None = None,
) -> Any:  # fmt: skip
    """The kernel of an fp8 layer."""
    del force_kernel, module_name
    config = FP8ScaledMMLinearLayerConfig(weight_quant_key, activation_quant_key, weight_shape, input_dtype, out_dtype)
    if activation_quant_key.scale.group_shape.is_per_group():
        found = _chosen(config, _POSSIBLE_FP8_BLOCK_KERNELS, "fp8_block_w8a8")
        return found(config, _NAMES) if issubclass(found, FP8ScaledMMLinearKernel) else found(config)
    return _chosen(config, _POSSIBLE_FP8_KERNELS, "fp8_w8a8")(config, _NAMES)


def init_int8_linear_kernel(
    is_channelwise: bool, is_static_input_scheme: bool, input_symmetric: bool, module_name: str, **newer: bool
) -> Any:
    """The kernel of an int8 layer; 0.33 asks whether layers were fused."""
    del module_name
    config = Int8ScaledMMLinearLayerConfig(is_static_input_scheme, is_channelwise, input_symmetric, **newer)
    names = ["weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj"]
    return _chosen(config, _POSSIBLE_INT8_KERNELS, "int8_w8a8")(config, names)


def choose_mp_linear_kernel(config: MPLinearLayerConfig, compute_capability: int | None = None) -> Any:
    """The class for a layer of integer weights."""
    del compute_capability
    possible = _possible(_POSSIBLE_KERNELS[current_platform._enum], "mixed_precision")
    return next(one for one in possible if one.get_min_capability() <= 90 and one.can_implement(config)[0])


def init_nvfp4_linear_kernel(use_a16: bool = False) -> NvFp4LinearKernel:
    """The kernel of an nvfp4 layer: Marlin's for 16-bit activations."""
    config = NvFp4LinearLayerConfig()
    if use_a16 and get_current_vllm_config().kernel_config.linear_backend == "auto":
        return MarlinNvFp4LinearKernel(config)
    return _chosen(config, _POSSIBLE_NVFP4_KERNELS, "nvfp4_w4a16" if use_a16 else "nvfp4_w4a4")(config)


def init_mxfp8_linear_kernel(*, weight_shape: tuple[int, int]) -> Mxfp8LinearKernel:
    """The kernel of an mxfp8 layer."""
    config = Mxfp8LinearLayerConfig(weight_shape)
    return _chosen(config, _POSSIBLE_MXFP8_KERNELS, "mxfp8")(config)


def init_mxfp4_linear_kernel(activation_quant_key: Any = None) -> MxFp4LinearKernel:
    """The kernel of an mxfp4 layer."""
    config = MxFp4LinearLayerConfig(activation_quant_key)
    return _chosen(config, _POSSIBLE_MXFP4_KERNELS, "mxfp4")(config)
