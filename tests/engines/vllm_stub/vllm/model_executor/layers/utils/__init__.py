"""The function of a plain product on a platform."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm import FORM

#: Numbers of tokens so far.
calls: list[int] = []


def default_unquantized_gemm(layer: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K] times weight [N, K]."""
    del layer
    calls.append(x.numel() // x.shape[-1])
    return torch.nn.functional.linear(x, weight, bias)


if FORM >= (0, 33):

    def dispatch_unquantized_gemm(linear_backend: str = "auto") -> Callable[..., torch.Tensor]:
        """That of GPUs, or FlashInfer's where it is named."""
        if linear_backend != "flashinfer_cutedsl":
            return default_unquantized_gemm
        return functools.partial(cuda_flashinfer_bf16_gemm, vllm_backend=linear_backend, pdl=False)

    def cuda_flashinfer_bf16_gemm(
        layer: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, pdl: bool, vllm_backend: str
    ) -> torch.Tensor:
        """x [..., K] times weight [N, K]."""
        del pdl, vllm_backend
        return default_unquantized_gemm(layer, x, weight, bias)
else:

    def dispatch_unquantized_gemm() -> Callable[..., torch.Tensor]:
        """That of GPUs."""
        return default_unquantized_gemm
