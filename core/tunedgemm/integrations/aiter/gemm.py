"""AITER's products whose arguments differ from ours.

Functions named after a backend take the output as an argument. They run the solution that the
tables choose, and copy its result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tunedgemm.integrations.aiter.operands import shuffled, whole_scale
from tunedgemm.integrations.aiter.outputs import output_dtype, written
from tunedgemm.ops.scale_order import SHUFFLED

if TYPE_CHECKING:
    import torch


def gemm_a8w8_bpreshuffle(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    check: bool = False,
) -> torch.Tensor:
    """Call `tunedgemm.gemm_a8w8_bpreshuffle`; a plain WQ holds shuffled bytes, as in AITER.

    XQ gets zeros up to the K of a weight that was padded, as `shuffle_weight` does with pad_k_to.
    """
    import torch

    import tunedgemm

    if XQ.shape[-1] < WQ.shape[-1] and XQ.element_size() == 1:
        XQ = torch.nn.functional.pad(XQ.view(torch.uint8), (0, WQ.shape[-1] - XQ.shape[-1])).view(XQ.dtype)
    return tunedgemm.gemm_a8w8_bpreshuffle(XQ, shuffled(WQ), x_scale, w_scale, bias, dtype, check)  # type: ignore[no-any-return]


def gemm_a8w8_blockscale(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    dtype: torch.dtype | None = None,
    isBpreshuffled: bool = False,
) -> torch.Tensor:
    """Call `tunedgemm.gemm_a8w8_blockscale`; with isBpreshuffled WQ holds shuffled bytes."""
    import tunedgemm

    if not isBpreshuffled:
        return tunedgemm.gemm_a8w8_blockscale(XQ, WQ, x_scale, w_scale, dtype)  # type: ignore[no-any-return]
    return gemm_a8w8_blockscale_bpreshuffle(XQ, WQ, tunedgemm.transposed_scale(x_scale), w_scale, dtype)


def gemm_a8w8_blockscale_bpreshuffle(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Call `tunedgemm.gemm_a8w8_blockscale_bpreshuffle`; a plain WQ holds shuffled bytes, as in AITER."""
    import tunedgemm

    product = tunedgemm.gemm_a8w8_blockscale_bpreshuffle(XQ, shuffled(WQ), x_scale, w_scale, output_dtype(out, dtype))
    return written(out, product)


def gemm_a4w4(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    alpha: float | None = 1.0,
    beta: float | None = 0.0,
    bpreshuffle: bool | None = True,
    apreshuffle: bool | None = False,
    global_A_scale: torch.Tensor | None = None,
    global_B_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Call `tunedgemm.gemm_a4w4`; plain scales, and B with bpreshuffle, hold shuffled bytes, as in AITER."""
    import tunedgemm

    weight, k = shuffled(B) if bpreshuffle else B, 2 * A.shape[-1]
    scales = whole_scale(A_scale, k), whole_scale(B_scale, k)
    rest = (bias, dtype, alpha, beta, bpreshuffle, apreshuffle, global_A_scale, global_B_scale)
    return tunedgemm.gemm_a4w4(A, weight, *scales, *rest, scale_order=SHUFFLED)  # type: ignore[no-any-return]


def gemm_by_table(
    inp: torch.Tensor,
    weights: torch.Tensor,
    solidx: int,
    bias: torch.Tensor | None = None,
    otype: torch.dtype | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    scale_c: torch.Tensor | None = None,
    bpreshuffle: bool | None = False,
    config: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    """Call `tunedgemm.gemm_a16w16`; backend, solidx and config are the table's."""
    import tunedgemm

    del solidx, config
    weight = shuffled(weights) if bpreshuffle else weights
    return tunedgemm.gemm_a16w16(inp, weight, bias, otype, scale_a, scale_b, scale_c)  # type: ignore[no-any-return]


def gemm_a16w16_asm(
    A: torch.Tensor,
    B: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    splitK: int | None = None,
    kernelName: str | None = None,
    bpreshuffle: bool = False,
) -> torch.Tensor:
    """Write `tunedgemm.gemm_a16w16` to *out*; splitK and kernelName are the table's."""
    import tunedgemm

    del splitK, kernelName
    return written(out, tunedgemm.gemm_a16w16(A, shuffled(B) if bpreshuffle else B, bias, out.dtype))


def wvSpltK(in_a: torch.Tensor, in_b: torch.Tensor, out_c: torch.Tensor, N_in: int, CuCount: int) -> None:
    """Write `tunedgemm.gemm_a16w16` of the weight in_a and the activations in_b to out_c."""
    import tunedgemm

    del N_in, CuCount
    written(out_c, tunedgemm.gemm_a16w16(in_b, in_a, None, out_c.dtype))


def LLMM1(in_a: torch.Tensor, in_b: torch.Tensor, out_c: torch.Tensor, rows_per_block: int) -> None:
    """Write `tunedgemm.gemm_a16w16` of the weight in_a and the activations in_b to out_c."""
    wvSpltK(in_a, in_b, out_c, rows_per_block, 0)


def wvSplitKQ(
    in_a: torch.Tensor, in_b: torch.Tensor, out_c: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, CuCount: int
) -> None:
    """Write the product of the fp8 weight in_a and activations in_b, with one scale each, to out_c."""
    import tunedgemm

    del CuCount
    written(out_c, tunedgemm.gemm_a16w16(in_b, in_a, None, out_c.dtype, scale_b, scale_a))


def gemm_a8w8_ck(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    Out: torch.Tensor,
    bias: torch.Tensor | None = None,
    splitK: int = 0,
) -> torch.Tensor:
    """Write `tunedgemm.gemm_a8w8` to *Out*; splitK is the table's."""
    import tunedgemm

    del splitK
    return written(Out, tunedgemm.gemm_a8w8(XQ, WQ, x_scale, w_scale, bias, Out.dtype))


def gemm_a8w8_asm(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    Out: torch.Tensor,
    kernelName: str = "",
    bias: torch.Tensor | None = None,
    bpreshuffle: bool | None = True,
    splitK: int | None = None,
) -> torch.Tensor:
    """Write the product of plain or shuffled weights to *Out*; kernelName and splitK are the table's."""
    import tunedgemm

    del kernelName, splitK
    function, weight = (tunedgemm.gemm_a8w8, WQ) if bpreshuffle is False else (tunedgemm.gemm_a8w8_bpreshuffle, shuffled(WQ))
    return written(Out, function(XQ, weight, x_scale, w_scale, bias, Out.dtype))


def gemm_a8w8_bpreshuffle_ck(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    Out: torch.Tensor,
    splitK: int = 0,
) -> torch.Tensor:
    """Write `gemm_a8w8_bpreshuffle` to *Out*; splitK is the table's."""
    del splitK
    return written(Out, gemm_a8w8_bpreshuffle(XQ, WQ, x_scale, w_scale, None, Out.dtype))


def gemm_a8w8_bpreshuffle_cktile(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    out: torch.Tensor,
    splitK: int = 0,
) -> torch.Tensor:
    """Write `gemm_a8w8_bpreshuffle` to *out*; splitK is the table's."""
    return gemm_a8w8_bpreshuffle_ck(XQ, WQ, x_scale, w_scale, out, splitK)


def gemm_a8w8_bpreshuffle_flydsl(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    Out: torch.Tensor,
    config: Mapping[str, Any],
) -> torch.Tensor:
    """Write `gemm_a8w8_bpreshuffle` to *Out*; the configuration is the table's."""
    del config
    return gemm_a8w8_bpreshuffle_ck(XQ, WQ, x_scale, w_scale, Out)


def gemm_a8w8_blockscale_ck(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    Out: torch.Tensor,
    splitK: int = 0,
    kernelName: str = "",
) -> torch.Tensor:
    """Write `gemm_a8w8_blockscale` to *Out*; splitK and kernelName are the table's."""
    del splitK, kernelName
    return written(Out, gemm_a8w8_blockscale(XQ, WQ, x_scale, w_scale, Out.dtype))


def gemm_a8w8_blockscale_cktile(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    Out: torch.Tensor,
    isBpreshuffled: bool = False,
    splitK: int = 0,
    kernelName: str = "",
) -> torch.Tensor:
    """Write `gemm_a8w8_blockscale` to *Out*; splitK and kernelName are the table's."""
    del splitK, kernelName
    return written(Out, gemm_a8w8_blockscale(XQ, WQ, x_scale, w_scale, Out.dtype, isBpreshuffled))


def gemm_a8w8_blockscale_bpreshuffle_ck(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    Out: torch.Tensor,
    kernelName: str = "",
) -> torch.Tensor:
    """Write `gemm_a8w8_blockscale_bpreshuffle` to *Out*; kernelName is the table's."""
    del kernelName
    return gemm_a8w8_blockscale_bpreshuffle(XQ, WQ, x_scale, w_scale, None, Out)


def gemm_a8w8_blockscale_bpreshuffle_cktile(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    Out: torch.Tensor,
    isBpreshuffled: bool = True,
    kernelName: str = "",
) -> torch.Tensor:
    """Write `gemm_a8w8_blockscale_bpreshuffle` to *Out*; kernelName is the table's."""
    import tunedgemm

    del kernelName
    if isBpreshuffled:
        return gemm_a8w8_blockscale_bpreshuffle(XQ, WQ, x_scale, w_scale, None, Out)
    return gemm_a8w8_blockscale_ck(XQ, WQ, tunedgemm.untransposed_scale(x_scale), w_scale, Out)


def gemm_a8w8_blockscale_bpreshuffle_asm(
    A: torch.Tensor,
    B: torch.Tensor,
    out: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    splitK: int | None = None,
    kernelName: str | None = None,
    bpreshuffle: bool | None = True,
    zero_bias_buf: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write the product and the bias to *out*; splitK and kernelName are the table's."""
    import torch

    del splitK, zero_bias_buf
    if bias is None:
        return gemm_a8w8_blockscale_bpreshuffle_cktile(A, B, A_scale, B_scale, out, bpreshuffle is not False, kernelName or "")
    product = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    gemm_a8w8_blockscale_bpreshuffle_cktile(A, B, A_scale, B_scale, product, bpreshuffle is not False)
    return written(out, product + bias)


def gemm_a4w4_asm(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    out: torch.Tensor,
    kernelName: str = "",
    bias: torch.Tensor | None = None,
    alpha: float | None = 1.0,
    beta: float | None = 0.0,
    bpreshuffle: bool | None = True,
    log2_k_split: int | None = None,
) -> torch.Tensor:
    """Write `gemm_a4w4` to *out*; kernelName and log2_k_split are the table's."""
    del kernelName, log2_k_split
    return written(out, gemm_a4w4(A, B, A_scale, B_scale, bias, out.dtype, alpha, beta, bpreshuffle))


def gemm_a4w4_blockscale(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    Out: torch.Tensor,
    splitK: int = 0,
    kernelName: str = "",
) -> torch.Tensor:
    """Write `gemm_a4w4` of a shuffled weight to *Out*; splitK and kernelName are the table's."""
    del splitK, kernelName
    return written(Out, gemm_a4w4(XQ, WQ, x_scale, w_scale, None, Out.dtype))


def batched_gemm_bf16(
    XQ: torch.Tensor, WQ: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None, splitK: int = 0
) -> torch.Tensor:
    """Write `tunedgemm.batched_gemm_bf16` to *out*; splitK is the table's."""
    import tunedgemm

    del splitK
    return written(out, tunedgemm.batched_gemm_bf16(XQ, WQ, bias, out.dtype))


def batched_gemm_a8w8(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    splitK: int = 0,
) -> torch.Tensor:
    """Write `tunedgemm.batched_gemm_a8w8` to *out*; splitK is the table's."""
    import tunedgemm

    del splitK
    return written(out, tunedgemm.batched_gemm_a8w8(XQ, WQ, x_scale, w_scale, bias, out.dtype))
