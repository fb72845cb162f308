"""The method of vLLM's linear layers whose weights are not quantised."""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm import FORM
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.utils import dispatch_unquantized_gemm

#: Numbers of tokens of vLLM's batch-invariant product.
invariant_calls: list[int] = []


class UnquantizedLinearMethod:
    """Multiplies by the platform's function, which 0.33 chooses when the method is made."""

    if FORM >= (0, 33):

        def __init__(self) -> None:
            self._gemm_impl = dispatch_unquantized_gemm(get_current_vllm_config().kernel_config.linear_backend)

    def create_weights(self, layer: torch.nn.Module, *sizes: object, **attributes: object) -> None:
        """Nothing to do: the layers of tests bring their weights."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing to do."""

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] times the layer's weight [N, K]."""
        layer.asked = getattr(layer, "asked", 0) + 1
        if os.environ.get("VLLM_BATCH_INVARIANT", "0") != "0":
            invariant_calls.append(x.numel() // x.shape[-1])
            return torch.nn.functional.linear(x, layer.weight, bias)
        gemm: Any = self._gemm_impl if FORM >= (0, 33) else dispatch_unquantized_gemm()
        out: torch.Tensor = gemm(layer, x, layer.weight, bias)
        return out
