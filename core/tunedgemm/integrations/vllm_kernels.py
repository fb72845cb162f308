"""Linear kernels for vLLM: fp8 and int8 layers, whatever quantisation method they are of, multiplied through the tables.

For each quantised layer vLLM asks its kernels, in order of preference, whether they run on the platform and implement the layer
(``vllm.model_executor.kernels.linear``, vLLM 0.20 and newer). Those here come first and take a layer that `left` does not leave to vLLM.
Activations are quantised by vLLM's own functions. Loaded where vLLM is installed, by `tunedgemm.integrations.vllm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm import _custom_ops
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearKernel, Int8ScaledMMLinearKernel
from vllm.model_executor.layers.quantization.utils.w8a8_utils import convert_to_channelwise
from vllm.platforms import current_platform

from tunedgemm import gemm_a8w8, gemm_a8w8_blockscale
from tunedgemm.integrations.vllm_rows import left

#: A kernel's answer to whether it can: vLLM's form.
Answer = tuple[bool, str | None]

_OUTPUTS = (torch.bfloat16, torch.float16)
_BLOCK = 128


def install() -> None:
    """Put these kernels before all others of the platform.

    Raises:
        AttributeError: this version of vLLM keeps its kernels in another form.
    """
    lists = {
        TunedGemmFp8Kernel: linear._POSSIBLE_FP8_KERNELS,
        TunedGemmFp8BlockKernel: linear._POSSIBLE_FP8_BLOCK_KERNELS,
        TunedGemmInt8Kernel: linear._POSSIBLE_INT8_KERNELS,
    }
    for kernel, known in lists.items():
        known.setdefault(current_platform._enum, []).insert(0, kernel)


def _put(layer: Any, name: str, value: torch.Tensor) -> None:
    """Put a parameter of torch's own class in the place of one of vLLM's, which know how to be loaded: tables serve no subclasses."""
    setattr(layer, name, torch.nn.Parameter(value, requires_grad=False))


def _answer(reason: str) -> Answer:
    return not reason, reason or None


class _Everywhere:
    """A kernel for every platform: what runs on one is the tables' matter."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """On every platform."""
        del compute_capability
        return True, None


class TunedGemmFp8Kernel(_Everywhere, FP8ScaledMMLinearKernel):  # type: ignore[misc,unused-ignore]
    """fp8 with scales of the tensor, of tokens or of channels: `tunedgemm.gemm_a8w8`."""

    @classmethod
    def can_implement(cls, c: Any) -> Answer:
        """Symmetric scales, 16-bit output, and a weight that is not left to vLLM."""
        x, weight = c.activation_quant_key, c.weight_quant_key
        of_x, of_weight = x.scale.group_shape, weight.scale.group_shape
        if not (of_x.is_per_tensor() or of_x.is_per_token()) or not (of_weight.is_per_tensor() or of_weight.is_per_channel()):
            return False, "needs scales of the tensor, of tokens or of channels"
        if c.out_dtype not in _OUTPUTS or not (x.symmetric and weight.symmetric):
            return False, "needs symmetric scales and an output of bfloat16 or float16"
        return _answer(left("a8w8", *c.weight_shape, scale="tensor" if _both_of_tensors(c) else "row", dtype="fp8"))

    def input_quant_key(self) -> Any:
        """That of static scales: such activations may arrive quantised, by a norm that vLLM has fused with it."""
        key = self.config.activation_quant_key
        return key if key.scale.static and key.scale.group_shape.is_per_tensor() else None

    def process_weights_after_loading(self, layer: Any) -> None:
        """The weight, which vLLM keeps as a view [K, N], gets rows without padding; one scale for it becomes one a row where x has rows."""
        weight_name, scale_name = self.layer_param_names[:2]
        weight, scale = getattr(layer, weight_name), getattr(layer, scale_name)
        _put(layer, weight_name, weight.data.t().contiguous().t())
        single = _both_of_tensors(self.config)
        _put(layer, scale_name, scale.data.reshape(1) if single else scale.data.reshape(-1).expand(weight.shape[1]).contiguous())

    def apply_scaled_mm(
        self,
        *,
        A: torch.Tensor,
        B: torch.Tensor,
        out_dtype: torch.dtype,
        As: torch.Tensor,
        Bs: torch.Tensor,
        bias: torch.Tensor | None,
        output_shape: list[int],
    ) -> torch.Tensor:
        """A [M, K] fp8 times B, a view [K, N] of the weight, in the names of vLLM's signature."""
        if _both_of_tensors(self.config):
            x_scale = As.reshape(1)
        else:
            x_scale = _of_rows(As, A.shape[0], self.config.activation_quant_key.scale.group_shape.is_per_tensor())
        out: torch.Tensor = gemm_a8w8(A, B.t(), x_scale, Bs, bias, out_dtype)
        return out.view(*output_shape)


def _both_of_tensors(config: Any) -> bool:
    """Whether x and the weight have one scale each; else both are taken to have one a row."""
    return all(key.scale.group_shape.is_per_tensor() for key in (config.activation_quant_key, config.weight_quant_key))


def _of_rows(scale: torch.Tensor, rows: int, single: bool) -> torch.Tensor:
    """Scales [rows, 1] of x."""
    return scale.reshape(1, 1).expand(rows, 1).contiguous() if single else scale.reshape(rows, 1)


class TunedGemmFp8BlockKernel(_Everywhere, Fp8BlockScaledMMLinearKernel):  # type: ignore[misc,unused-ignore]
    """fp8 with scales of 1 x 128 elements of x and of 128 x 128 of the weight: `tunedgemm.gemm_a8w8_blockscale`."""

    @classmethod
    def can_implement(cls, config: Any) -> Answer:
        """Dynamic scales of these blocks in float32, 16-bit output, and a weight that is not left to vLLM."""
        able, reason = super().can_implement(config)
        if not able:
            return able, reason
        x, weight = config.activation_quant_key.scale, config.weight_quant_key.scale
        if tuple(x.group_shape) != (1, _BLOCK) or tuple(weight.group_shape) != (_BLOCK, _BLOCK) or weight.dtype is not torch.float32:
            return False, f"needs float32 scales of 1 x {_BLOCK} elements of x and {_BLOCK} x {_BLOCK} of the weight"
        if config.out_dtype not in _OUTPUTS:
            return False, "needs an output of bfloat16 or float16"
        return _answer(left("a8w8_blockscale", *config.weight_shape, scale="block", dtype="fp8"))

    def process_weights_after_loading(self, layer: Any) -> None:
        """As vLLM does it, without padding of the weight's rows."""
        super().process_weights_after_loading(layer)
        params = self._get_layer_params(layer)
        _put(layer, params.WEIGHT, params.weight.data.contiguous())
        name = "weight_scale" if getattr(params, "weight_scale_inv", None) is None else "weight_scale_inv"
        _put(layer, name, getattr(layer, name).data.contiguous())

    def apply_block_scaled_mm(self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor) -> torch.Tensor:
        """A [M, K] times the weight B [N, K], in the names of vLLM's signature."""
        out: torch.Tensor = gemm_a8w8_blockscale(A, B, As, Bs, self.config.out_dtype)
        return out


class TunedGemmInt8Kernel(_Everywhere, Int8ScaledMMLinearKernel):  # type: ignore[misc,unused-ignore]
    """int8 with symmetric scales: `tunedgemm.gemm_a8w8`.

    vLLM chooses it before it tells the weight's sizes. Where they turn out to be left to vLLM, this kernel is the one that vLLM would
    have chosen.
    """

    def __init__(self, c: Any, layer_param_names: Sequence[str]) -> None:
        super().__init__(c, layer_param_names)
        self._theirs: Any = None

    @classmethod
    def can_implement(cls, c: Any) -> Answer:
        """Symmetric scales."""
        return (True, None) if c.input_symmetric else (False, "needs symmetric scales of the activations")

    def process_weights_after_loading(self, layer: Any) -> None:
        """One scale a row of the weight, one for all of x where it is static."""
        weight_name, scale_name, x_scale_name = self.layer_param_names[:3]
        weight = getattr(layer, weight_name)
        n, k = weight.shape
        if left("a8w8", n, k, scale="row", dtype="int8"):
            self._theirs = self._chosen_by_vllm()
            self._theirs.process_weights_after_loading(layer)
            return
        scale = getattr(layer, scale_name)
        if len(layer.logical_widths) > 1 and not self.config.is_channelwise:
            scale = convert_to_channelwise(scale, layer.logical_widths)
        _put(layer, weight_name, weight.data)
        _put(layer, scale_name, scale.data.reshape(-1).expand(n).contiguous())
        if self.config.is_static_input_scheme:
            _put(layer, x_scale_name, getattr(layer, x_scale_name).data.max())
        else:
            setattr(layer, x_scale_name, None)

    def _chosen_by_vllm(self) -> Any:
        """vLLM's own kernel for the layer.

        Raises:
            ValueError: there is none.
        """
        for kernel in linear._POSSIBLE_INT8_KERNELS[current_platform._enum]:
            if kernel is not type(self) and linear.is_supported_and_can_implement_kernel(kernel, self.config, None)[0]:
                return kernel(self.config, self.layer_param_names)
        raise ValueError("vLLM has no kernel of its own for this int8 layer, and no table has a row for it")

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] of 16 bits to [..., N]."""
        if self._theirs is not None:
            theirs: torch.Tensor = self._theirs.apply_weights(layer, x, bias)
            return theirs
        weight, w_scale, x_scale = self._get_layer_params(layer)[:3]
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        quantise = _custom_ops.onednn_scaled_int8_quant if x.device.type == "cpu" else _custom_ops.scaled_int8_quant
        q, scale, _ = quantise(rows, x_scale, None, True)
        out: torch.Tensor = gemm_a8w8(q, weight, _of_rows(scale, rows.shape[0], x_scale is not None), w_scale, bias, x.dtype)
        return out.view(*x.shape[:-1], weight.shape[0])
