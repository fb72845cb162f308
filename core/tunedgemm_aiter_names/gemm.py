"""AITER's products whose arguments differ from ours.

Functions named after a backend take the output as an argument. They run the solution that the
tables choose, and copy its result; splitK, the kernel's name and the configuration are the table's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import tunedgemm
from torch import Tensor

from tunedgemm_aiter_names.operands import SHUFFLED, shuffled, whole_scale
from tunedgemm_aiter_names.outputs import output_dtype, written
from tunedgemm_aiter_names.signatures import functions


def gemm_a8w8_bpreshuffle(
    XQ: Tensor,
    WQ: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    check: bool = False,
) -> Tensor:
    """Call `tunedgemm.gemm_a8w8_bpreshuffle`; a plain WQ holds shuffled bytes, as in AITER.

    XQ gets zeros up to the K of a weight that was padded, as `shuffle_weight` does with pad_k_to.
    """
    if XQ.shape[-1] < WQ.shape[-1] and XQ.element_size() == 1:
        XQ = torch.nn.functional.pad(XQ.view(torch.uint8), (0, WQ.shape[-1] - XQ.shape[-1])).view(XQ.dtype)
    return tunedgemm.gemm_a8w8_bpreshuffle(XQ, shuffled(WQ), x_scale, w_scale, bias, dtype, check)


def gemm_a8w8_blockscale(
    XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype | None = None, isBpreshuffled: bool = False
) -> Tensor:
    """Call `tunedgemm.gemm_a8w8_blockscale`; with isBpreshuffled WQ holds shuffled bytes."""
    if not isBpreshuffled:
        return tunedgemm.gemm_a8w8_blockscale(XQ, WQ, x_scale, w_scale, dtype)
    return blockscale_bpreshuffle(XQ, WQ, tunedgemm.transposed_scale(x_scale), w_scale, output_dtype(None, dtype))


def gemm_a4w4(
    A: Tensor,
    B: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    alpha: float | None = 1.0,
    beta: float | None = 0.0,
    bpreshuffle: bool | None = True,
    apreshuffle: bool | None = False,
    global_A_scale: Tensor | None = None,
    global_B_scale: Tensor | None = None,
) -> Tensor:
    """Call `tunedgemm.gemm_a4w4`; plain scales, and B with bpreshuffle, hold shuffled bytes, as in AITER."""
    weight, k = shuffled(B) if bpreshuffle else B, 2 * A.shape[-1]
    scales = whole_scale(A_scale, k), whole_scale(B_scale, k)
    rest: tuple[Any, ...] = (bias, dtype, alpha, beta, bpreshuffle, apreshuffle, global_A_scale, global_B_scale)
    return tunedgemm.gemm_a4w4(A, weight, *scales, *rest, scale_order=SHUFFLED)


def gemm_by_table(
    inp: Tensor,
    weights: Tensor,
    solidx: int,
    bias: Tensor | None = None,
    otype: torch.dtype | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    scale_c: Tensor | None = None,
    bpreshuffle: bool | None = False,
    config: Mapping[str, Any] | None = None,
) -> Tensor:
    """Call `tunedgemm.gemm_a16w16`; backend, solidx and config are the table's."""
    del solidx, config
    weight = shuffled(weights) if bpreshuffle else weights
    return tunedgemm.gemm_a16w16(inp, weight, bias, otype, scale_a, scale_b, scale_c)


def a16w16(x: Tensor, w: Tensor, dtype: torch.dtype, bias: Tensor | None, bpreshuffle: bool) -> Tensor:
    """Write `tunedgemm.gemm_a16w16` to the output; with bpreshuffle the weight holds shuffled bytes."""
    return tunedgemm.gemm_a16w16(x, shuffled(w) if bpreshuffle else w, bias, dtype)


def few_rows(in_a: Tensor, in_b: Tensor, out_c: Tensor, scale_a: Tensor | None = None, scale_b: Tensor | None = None) -> None:
    """Write the product of the weight in_a and the activations in_b to out_c; fp8 has one scale each."""
    written(out_c, tunedgemm.gemm_a16w16(in_b, in_a, None, out_c.dtype, scale_b, scale_a))


def a8w8(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """Write `tunedgemm.gemm_a8w8` to the output."""
    return tunedgemm.gemm_a8w8(x, w, x_scale, w_scale, bias, dtype)


def a8w8_asm(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype, bias: Tensor | None, bpreshuffle: bool | None
) -> Tensor:
    """Write the product of a shuffled weight to the output; with bpreshuffle=False that of a plain one."""
    if bpreshuffle is False:
        return a8w8(x, w, x_scale, w_scale, dtype, bias)
    return tunedgemm.gemm_a8w8_bpreshuffle(x, shuffled(w), x_scale, w_scale, bias, dtype)


def blockscale_bpreshuffle(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype, isBpreshuffled: bool = True
) -> Tensor:
    """Call `tunedgemm.gemm_a8w8_blockscale_bpreshuffle`; a plain weight holds shuffled bytes, as in AITER.

    With isBpreshuffled=False the weight is plain, and the scales of x are transposed as before.
    """
    if isBpreshuffled:
        return tunedgemm.gemm_a8w8_blockscale_bpreshuffle(x, shuffled(w), x_scale, w_scale, dtype)
    return tunedgemm.gemm_a8w8_blockscale(x, w, tunedgemm.untransposed_scale(x_scale), w_scale, dtype)


def blockscale_asm(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype, bias: Tensor | None, bpreshuffle: bool | None
) -> Tensor:
    """Write the product and the bias, summed in float32, to the output."""
    product = blockscale_bpreshuffle(x, w, x_scale, w_scale, dtype if bias is None else torch.float32, bpreshuffle is not False)
    return product if bias is None else product + bias


def batched_bf16(x: Tensor, w: Tensor, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """Compute ``x[B, M, K] @ w[B, N, K].mT (+ bias[B, 1, N])``."""
    return tunedgemm.batched_gemm_bf16(x, w, bias, dtype)


def batched_a8w8(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """Compute ``(x @ w.mT) * x_scale[B, M, 1] * w_scale[B, 1, N] (+ bias[B, 1, N])``."""
    return tunedgemm.batched_gemm_a8w8(x, w, x_scale, w_scale, bias, dtype)


globals().update(functions(__name__, {
    a16w16: {"gemm_a16w16_asm": "A, B, out, bias=None, splitK=None, kernelName=None, bpreshuffle=False"},
    few_rows: {
        "wvSpltK": "in_a, in_b, out_c, N_in, CuCount",
        "LLMM1": "in_a, in_b, out_c, rows_per_block",
        "wvSplitKQ": "in_a, in_b, out_c, scale_a, scale_b, CuCount",
    },
    a8w8: {"gemm_a8w8_ck": "XQ, WQ, x_scale, w_scale, Out, bias=None, splitK=0"},
    a8w8_asm: {"gemm_a8w8_asm": "XQ, WQ, x_scale, w_scale, Out, kernelName='', bias=None, bpreshuffle=True, splitK=None"},
    gemm_a8w8_bpreshuffle: {
        "gemm_a8w8_bpreshuffle_ck": "XQ, WQ, x_scale, w_scale, Out, splitK=0",
        "gemm_a8w8_bpreshuffle_cktile": "XQ, WQ, x_scale, w_scale, out, splitK=0",
        "gemm_a8w8_bpreshuffle_flydsl": "XQ, WQ, x_scale, w_scale, Out, config",
    },
    gemm_a8w8_blockscale: {
        "gemm_a8w8_blockscale_ck": "XQ, WQ, x_scale, w_scale, Out, splitK=0, kernelName=''",
        "gemm_a8w8_blockscale_cktile": "XQ, WQ, x_scale, w_scale, Out, isBpreshuffled=False, splitK=0, kernelName=''",
    },
    blockscale_bpreshuffle: {
        "gemm_a8w8_blockscale_bpreshuffle": "XQ, WQ, x_scale, w_scale, dtype=None, out=None",
        "gemm_a8w8_blockscale_bpreshuffle_ck": "XQ, WQ, x_scale, w_scale, Out, kernelName=''",
        "gemm_a8w8_blockscale_bpreshuffle_cktile": "XQ, WQ, x_scale, w_scale, Out, isBpreshuffled=True, kernelName=''",
    },
    blockscale_asm: {
        "gemm_a8w8_blockscale_bpreshuffle_asm":
            "A, B, out, A_scale, B_scale, bias=None, splitK=None, kernelName=None, bpreshuffle=True, zero_bias_buf=None",
    },
    gemm_a4w4: {
        "gemm_a4w4_asm":
            "A, B, A_scale, B_scale, out, kernelName='', bias=None, alpha=1.0, beta=0.0, bpreshuffle=True, log2_k_split=None",
        "gemm_a4w4_blockscale": "XQ, WQ, x_scale, w_scale, Out, splitK=0, kernelName=''",
    },
    batched_bf16: {"batched_gemm_bf16": "XQ, WQ, out, bias=None, splitK=0"},
    batched_a8w8: {"batched_gemm_a8w8": "XQ, WQ, x_scale, w_scale, out, bias=None, splitK=0"},
}))  # fmt: skip
