"""The method of vLLM's linear layers with fp8 weights; what it asks of a layer after loading is what its kernels want."""

from __future__ import annotations

import torch
from vllm import _custom_ops
from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8


class Fp8LinearMethod:
    """Multiplies what it dequantises.

    Attributes:
        moved: whether its kernel wants the rows of a weight in another order, which the weight's shape does not tell.
    """

    def __init__(self, *, moved: bool = False) -> None:
        self.moved = moved

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """The transposed view of a weight without blocks; the kernel's own order."""
        weight = layer.weight.data.flip(0).contiguous() if self.moved else layer.weight.data
        kept = weight if hasattr(layer, "weight_scale_inv") else weight.t()
        layer.weight = torch.nn.Parameter(kept, requires_grad=False)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] in bf16 times the layer's weight, quantised by its own scales."""
        layer.asked = getattr(layer, "asked", 0) + 1
        if hasattr(layer, "weight_scale_inv"):
            q, scale = per_token_group_quant_fp8(x, 128)
            wide = scale.repeat_interleave(128, -1)[..., : x.shape[-1]]
            weight = layer.weight.float()
            spread = layer.weight_scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)
            weight = weight * spread[: weight.shape[0], : weight.shape[1]]
        else:
            rows, wide = _custom_ops.scaled_fp8_quant(x.reshape(-1, x.shape[-1]), layer.input_scale, use_per_token_if_dynamic=True)
            q, wide = rows.view(x.shape), wide.view(*x.shape[:-1], 1) if wide.numel() > 1 else wide
            weight = layer.weight.t().float() * layer.weight_scale.reshape(-1, 1)
        weight = weight.flip(0) if self.moved else weight
        out = (q.float() * wide) @ weight.t()
        return (out if bias is None else out + bias).to(x.dtype)
