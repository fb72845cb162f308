"""AITER's batched Triton products, `aiter.ops.triton.gemm.batched`; see `triton_basic`."""

from __future__ import annotations

import torch
import tunedgemm
from torch import Tensor
from tunedgemm.integrations import OperandError

from tunedgemm_aiter_names.gemm import batched_a8w8, batched_bf16
from tunedgemm_aiter_names.signatures import functions


def batched_a16wfp4(
    x: Tensor, w: Tensor, w_scale: Tensor, dtype: torch.dtype, transpose_bm: bool | None = False, y_scale: Tensor | None = None
) -> Tensor:
    """Compute ``x[B, M, K] @ w.mT`` of bf16 and mxfp4; x is not rounded to mxfp4 as in AITER.

    Args:
        w, w_scale: [B, N, K/2] and [B, N, K/32], dequantised to x's dtype in each call.
        transpose_bm: whether the output is [M, B, N].
        y_scale: must be None.

    Raises:
        OperandError: the operands do not fit each other, or there is a y_scale.
    """
    if y_scale is not None:
        raise OperandError("batched_gemm_a16wfp4: y_scale is not supported; quantise the output")
    product = tunedgemm.batched_gemm_bf16(x, tunedgemm.dequant_fp4(w, w_scale, x.dtype), None, dtype)
    return product.transpose(0, 1) if transpose_bm else product


def batched_afp4wfp4(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute ``x[B, M, K] @ w[B, N, K].mT`` of mxfp4, dequantised to bf16 in each call."""
    return batched_a16wfp4(tunedgemm.dequant_fp4(x, x_scale, torch.bfloat16), w, w_scale, dtype)


def batched_a16w8(
    x: Tensor,
    w: Tensor,
    w_scale: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    transpose_bm: bool | None = False,
    transpose_bm_in: bool | None = False,
) -> Tensor:
    """Compute ``x[B, M, K] @ w.mT * w_scale (+ bias)``; x is not rounded to 8 bits as in AITER.

    Args:
        w, w_scale: int8 or fp8 [B, N, K] and its one scale; w is converted to x's dtype, exactly.
        transpose_bm, transpose_bm_in: whether the output and x have M before B.
    """
    x = x.transpose(0, 1) if transpose_bm_in else x
    product = tunedgemm.batched_gemm_bf16(x.contiguous(), w.to(x.dtype), None, torch.float32) * w_scale.to(torch.float32)
    product = product if bias is None else product + bias
    return (product.transpose(0, 1) if transpose_bm else product).to(dtype)


globals().update(functions(__name__, {
    batched_bf16: {"batched_gemm_bf16": "XQ, WQ, bias=None, dtype=None, splitK=None, YQ=None, config=None, kernel_type='', backend=None"},
    batched_a8w8: {"batched_gemm_a8w8": "XQ, WQ, x_scale, w_scale, bias=None, dtype=None, splitK=None, YQ=None, config=None"},
    batched_a16wfp4: {
        "batched_gemm_a16wfp4": "x, w, w_scales, dtype=None, y=None, config=None, transpose_bm=False, prequant=True, y_scale=None",
        "batched_gemm_afp4wfp4_pre_quant": "x, w, w_scales, dtype=None, y=None, config=None",
    },
    batched_afp4wfp4: {"batched_gemm_afp4wfp4": "x, w, x_scales, w_scales, dtype=None, y=None, config=None"},
    batched_a16w8: {
        "batched_gemm_a8w8_a_per_token_group_prequant_w_per_batched_tensor_quant":
            "X, WQ, w_scale, group_size=128, bias=None, dtype=None, splitK=None, YQ=None, transpose_bm=False, transpose_bm_in=False, "
            "config=None",
    },
}))  # fmt: skip
