"""AITER's batched Triton products, `aiter.ops.triton.gemm.batched`; see `triton_basic`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunedgemm.errors import OperandError
from tunedgemm.integrations.aiter.outputs import output_dtype, written

if TYPE_CHECKING:
    import torch


def batched_gemm_bf16(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    splitK: int | None = None,
    YQ: torch.Tensor | None = None,
    config: Any = None,
    kernel_type: str = "",
    backend: str | None = None,
) -> torch.Tensor:
    """Compute ``XQ[B, M, K] @ WQ[B, N, K].mT (+ bias[B, 1, N])``."""
    import tunedgemm

    del config, kernel_type, backend
    return written(YQ, tunedgemm.batched_gemm_bf16(XQ, WQ, bias, output_dtype(YQ, dtype), splitK))


def batched_gemm_a8w8(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    splitK: int | None = None,
    YQ: torch.Tensor | None = None,
    config: Any = None,
) -> torch.Tensor:
    """Compute ``(XQ @ WQ.mT) * x_scale[B, M, 1] * w_scale[B, 1, N] (+ bias[B, 1, N])``."""
    import tunedgemm

    del config
    return written(YQ, tunedgemm.batched_gemm_a8w8(XQ, WQ, x_scale, w_scale, bias, output_dtype(YQ, dtype), splitK))


def batched_gemm_a16wfp4(
    x: torch.Tensor,
    w: torch.Tensor,
    w_scales: torch.Tensor,
    dtype: torch.dtype | None = None,
    y: torch.Tensor | None = None,
    config: Any = None,
    transpose_bm: bool | None = False,
    prequant: bool | None = True,
    y_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``x[B, M, K] @ w.mT`` of bf16 and mxfp4; x is not rounded to mxfp4 as in AITER.

    Args:
        w, w_scales: [B, N, K/2] and [B, N, K/32], dequantised to x's dtype in each call.
        transpose_bm: whether the output is [M, B, N].
        y_scale: must be None.

    Raises:
        OperandError: the operands do not fit each other, or there is a y_scale.
    """
    import tunedgemm

    del config, prequant
    if y_scale is not None:
        raise OperandError("batched_gemm_a16wfp4: y_scale is not supported; quantise the output")
    product = tunedgemm.batched_gemm_bf16(x, tunedgemm.dequant_fp4(w, w_scales, x.dtype), None, output_dtype(y, dtype))
    return written(y, product.transpose(0, 1) if transpose_bm else product)


def batched_gemm_afp4wfp4_pre_quant(
    x: torch.Tensor,
    w: torch.Tensor,
    w_scales: torch.Tensor,
    dtype: torch.dtype | None = None,
    y: torch.Tensor | None = None,
    config: Any = None,
) -> torch.Tensor:
    """Compute ``x[B, M, K] @ w.mT`` as `batched_gemm_a16wfp4`."""
    return batched_gemm_a16wfp4(x, w, w_scales, dtype, y, config)


def batched_gemm_afp4wfp4(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scales: torch.Tensor,
    w_scales: torch.Tensor,
    dtype: torch.dtype | None = None,
    y: torch.Tensor | None = None,
    config: Any = None,
) -> torch.Tensor:
    """Compute ``x[B, M, K] @ w[B, N, K].mT`` of mxfp4, dequantised to bf16 in each call."""
    import torch

    import tunedgemm

    return batched_gemm_a16wfp4(tunedgemm.dequant_fp4(x, x_scales, torch.bfloat16), w, w_scales, dtype, y, config)


def batched_gemm_a8w8_a_per_token_group_prequant_w_per_batched_tensor_quant(
    X: torch.Tensor,
    WQ: torch.Tensor,
    w_scale: torch.Tensor,
    group_size: int = 128,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    splitK: int | None = None,
    YQ: torch.Tensor | None = None,
    transpose_bm: bool | None = False,
    transpose_bm_in: bool | None = False,
    config: Any = None,
) -> torch.Tensor:
    """Compute ``X[B, M, K] @ WQ.mT * w_scale (+ bias)``; X is not rounded to 8 bits as in AITER.

    Args:
        WQ, w_scale: int8 or fp8 [B, N, K] and its one scale; WQ is converted to X's dtype, exactly.
        transpose_bm, transpose_bm_in: whether the output and X have M before B.
    """
    import torch

    import tunedgemm

    del group_size, config
    x = X.transpose(0, 1) if transpose_bm_in else X
    product = tunedgemm.batched_gemm_bf16(x.contiguous(), WQ.to(x.dtype), None, torch.float32, splitK) * w_scale.to(torch.float32)
    product = product if bias is None else product + bias
    return written(YQ, (product.transpose(0, 1) if transpose_bm else product).to(output_dtype(YQ, dtype)))
