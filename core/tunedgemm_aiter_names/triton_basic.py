"""AITER's Triton products, `aiter.ops.triton.gemm.basic`, by the solutions that the tables choose.

Each takes AITER's arguments. Accepted without effect: the launch configuration, the backend and
``skip_reduce``, since no product here leaves K split. A given *y* gets a copy of the result, which
is not added to its values. Formats without an op are dequantised to bf16 in each call, which
rounds nothing.
"""

from __future__ import annotations

import torch
import tunedgemm
from torch import Tensor
from tunedgemm import ShuffledWeight

from tunedgemm_aiter_names.operands import ROW, SHUFFLED, as_float, in_rows, of_rows, plain_rows, whole_scale
from tunedgemm_aiter_names.outputs import activated, float_dtype
from tunedgemm_aiter_names.signatures import functions

FP8 = torch.float8_e4m3fn
FP8_E5M2 = (torch.float8_e5m2, torch.float8_e5m2fnuz)


def a16w16(x: Tensor, w: Tensor, dtype: torch.dtype, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    """Compute ``activation(x[..., K] @ w[N, K].T (+ bias))``; a dtype of None is bf16."""
    product = tunedgemm.gemm_a16w16(x, in_rows(w), bias, dtype if activation is None else torch.float32)
    return activated(product, activation).to(dtype)


def a16w16_gated(x: Tensor, w: Tensor, dtype: torch.dtype, activation: str | None = None) -> Tensor:
    """Compute ``activation(first half) * second half`` of the columns of ``x[..., K] @ w[N, K].T``."""
    gate, up = a16w16(x, w, torch.float32).chunk(2, dim=-1)
    return (activated(gate, activation) * up).to(dtype)


def a8w8(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Compute ``(x @ w.T) * x_scale * w_scale (+ bias)`` with one scale for each row of x and w.

    e5m2 is converted to bf16 in each call, exactly; an output of integers is cut off.
    """
    if x.dtype not in FP8_E5M2:
        return tunedgemm.gemm_a8w8(x, in_rows(w), x_scale, w_scale, bias, float_dtype(dtype)).to(dtype)
    product = a16w16(x.to(torch.bfloat16), w.to(torch.bfloat16), torch.float32) * x_scale.view(-1, 1) * w_scale.view(1, -1)
    return (product if bias is None else product + bias).to(dtype)


def a8w8_preshuffle(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Compute `gemm_a8w8` of a shuffled weight, given as [N/16, K*16]."""
    product = tunedgemm.gemm_a8w8_bpreshuffle(x, of_rows(w, x.shape[-1]), x_scale, w_scale, bias, float_dtype(dtype))
    return product.to(dtype)


def a8w8_blockscale(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute ``x @ w.T`` with scales of 1x128 and 128x128 blocks."""
    return tunedgemm.gemm_a8w8_blockscale(x, in_rows(w), x_scale, w_scale, dtype)


def a8w8_blockscale_preshuffle(
    x: Tensor,
    w: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    dtype: torch.dtype,
    is_x_scale_tranposed: bool | None = True,
) -> Tensor:
    """Compute `gemm_a8w8_blockscale` of a shuffled weight, given as [N/16, K*16]."""
    scale = x_scale if is_x_scale_tranposed else tunedgemm.transposed_scale(x_scale)
    return tunedgemm.gemm_a8w8_blockscale_bpreshuffle(x, of_rows(w, x.shape[-1]), scale, w_scale, dtype)


def a16w8_blockscale(x: Tensor, w: Tensor, w_scale: Tensor, dtype: torch.dtype, prequant: bool | None = False) -> Tensor:
    """Compute ``x @ w.T`` of bf16 and fp8; with prequant x is quantised by 1x128 first."""
    if prequant:
        xq, x_scale = tunedgemm.per_1x128_quant(x, w.dtype)
        return a8w8_blockscale(xq, w, x_scale, w_scale, dtype)
    return a16w16(x, tunedgemm.dequant_blocks(w, as_float(w_scale), x.dtype, (128, 128)), dtype)


def a16w8_blockscale_preshuffle(x: Tensor, w: Tensor, w_scale: Tensor, dtype: torch.dtype, prequant: bool | None = False) -> Tensor:
    """Compute `gemm_a16w8_blockscale` of a shuffled weight [N/16, K*16], unshuffled in each call."""
    return a16w8_blockscale(x, plain_rows(w, x.shape[-1]), w_scale, dtype, prequant)


def a16wfp4(x: Tensor, w: Tensor, w_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute ``x @ w.T`` of bf16 and mxfp4; x is not rounded to mxfp4 as in AITER."""
    return tunedgemm.gemm_a16wfp4(x, in_rows(w), w_scale, dtype=dtype, scale_order=ROW)


def a16wfp4_preshuffle(x: Tensor, w: Tensor, w_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `gemm_a16wfp4` of a shuffled weight [N/16, K*8] with shuffled scales [N/32, K]."""
    k = x.shape[-1]
    scale = whole_scale(w_scale, k)
    return tunedgemm.gemm_a16wfp4(x, of_rows(w, k // 2), scale, dtype=dtype, bpreshuffle=True, scale_order=SHUFFLED)


def a8wfp4(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor) -> Tensor:
    """Write ``(x @ w.T) * x_scales`` of fp8 and mxfp4 to y."""
    return a16wfp4(x.to(torch.bfloat16), w, w_scale, torch.float32) * x_scale.reshape(-1, 1)


def afp4wfp4(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype, *, order: str = ROW) -> Tensor:
    """Compute ``x @ w.T`` of mxfp4 with plain weights and plain scales."""
    is_shuffled = isinstance(w, ShuffledWeight)
    return tunedgemm.gemm_a4w4(x, in_rows(w), x_scale, w_scale, dtype=dtype, bpreshuffle=is_shuffled, scale_order=order)


def afp4wfp4_preshuffled_scales(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `gemm_afp4wfp4` with shuffled scales [M/32, K] and [N/32, K]."""
    k = 2 * x.shape[-1]
    return afp4wfp4(x, w, whole_scale(x_scale, k), whole_scale(w_scale, k), dtype, order=SHUFFLED)


def afp4wfp4_preshuffle(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute ``x @ w.T`` of a shuffled weight [N/16, K*8] with shuffled scales [N/32, K].

    The scales of x are shuffled, too, [M/32, K]; those of fewer than 32 rows are plain.
    """
    m, half = x.shape
    scale = tunedgemm.shuffle_scale(x_scale) if x_scale.shape == (m, half // 16) else whole_scale(x_scale, 2 * half)
    return afp4wfp4(x, of_rows(w, half), scale, whole_scale(w_scale, 2 * half), dtype, order=SHUFFLED)


def afp8wfp8(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute ``x @ w.T`` of fp8 with e8m0 scales of 1x32 and 128x128 blocks, dequantised in each call."""
    x16 = tunedgemm.dequant_blocks(x.view(FP8), as_float(x_scale), torch.bfloat16, (1, 32))
    w16 = tunedgemm.dequant_blocks(w.view(FP8), as_float(w_scale), torch.bfloat16, (128, 128))
    return a16w16(x16, w16, dtype)


def afp8wfp8_preshuffle(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `gemm_afp8wfp8` of a shuffled weight, which is unshuffled in each call."""
    return afp8wfp8(x, plain_rows(w, x.shape[-1]), x_scale, w_scale, dtype)


globals().update(functions(__name__, {
    a16w16: {
        "gemm_a16w16": "x, w, bias=None, dtype=None, y=None, config=None, activation=None, skip_reduce=False, kernel_type='', backend=None",
        "gemm_a16w16_atomic": "x, w, dtype=None, y=None, config=None",
    },
    a16w16_gated: {"gemm_a16w16_gated": "x, w, dtype=None, y=None, config=None, activation=None"},
    a8w8: {
        "gemm_a8w8": "x, w, x_scale, w_scale, bias=None, dtype=None, y=None, config=None, skip_reduce=False",
        "gemm_a8w8_per_token_scale": "x, w, x_scale, w_scale, dtype=None, y=None, config=None",
    },
    a8w8_preshuffle: {"gemm_a8w8_preshuffle": "x, w, x_scale, w_scale, bias=None, dtype=None, y=None, config=None"},
    a8w8_blockscale: {
        "gemm_a8w8_blockscale":
            "x, w, x_scale, w_scale, dtype=None, y=None, config=None, skip_reduce=False, kernel_type='', backend=None",
    },
    a8w8_blockscale_preshuffle: {
        "gemm_a8w8_blockscale_preshuffle":
            "x, w, x_scale, w_scale, dtype=None, y=None, config=None, skip_reduce=False, is_x_scale_tranposed=True, kernel_type='', "
            "backend=None",
    },
    a16w8_blockscale: {
        "gemm_a16w8_blockscale": "x, w, w_scale, dtype=None, y=None, prequant=False, config=None, skip_reduce=False",
    },
    a16w8_blockscale_preshuffle: {
        "gemm_a16w8_blockscale_preshuffle": "x, w, w_scale, dtype=None, y=None, prequant=False, config=None, skip_reduce=False",
    },
    a16wfp4: {
        "gemm_a16wfp4": "x, w, w_scales, atomic_add=False, dtype=None, y=None, config=None",
        "gemm_afp4wfp4_pre_quant": "x, w, w_scales, dtype=None, y=None, config=None",
    },
    a16wfp4_preshuffle: {
        "gemm_a16wfp4_preshuffle": "x, w, w_scales, prequant=True, dtype=None, y=None, config=None, skip_reduce=False",
    },
    a8wfp4: {"gemm_a8wfp4": "x, w, y, x_scales, w_scales, dtype=None, config=None"},
    afp4wfp4: {"gemm_afp4wfp4": "x, w, x_scales, w_scales, dtype=None, y=None, config=None, skip_reduce=False"},
    afp4wfp4_preshuffled_scales: {"gemm_afp4wfp4_preshuffled_scales": "x, w, x_scales, w_scales, dtype=None, y=None, config=None"},
    afp4wfp4_preshuffle: {
        "gemm_afp4wfp4_preshuffle": "x_fp4, w_preshuf, x_scales, w_scales, dtype=None, y=None, config=None, skip_reduce=False",
        "gemm_afp4wfp4_preshuffled_weight_scales": "x, w, x_scales, w_scales, dtype=None, y=None, config=None",
    },
    afp8wfp8: {"gemm_afp8wfp8": "x, w, x_scales, w_scales, dtype=None, y=None, config=None, skip_reduce=False"},
    afp8wfp8_preshuffle: {
        "gemm_afp8wfp8_preshuffle": "x, w_shuffled, x_scales, w_scales, dtype=None, y=None, config=None, skip_reduce=False",
    },
}))  # fmt: skip
