"""AITER's Triton products, `aiter.ops.triton.gemm.basic`, by the solutions that the tables choose.

Each takes AITER's arguments. Accepted without effect: the launch configuration, the backend and
``skip_reduce``, since no product here leaves K split. A given *y* gets the result by a copy.
Formats without an op are dequantised to bf16 in each call, which rounds nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunedgemm.integrations.aiter.operands import as_float, in_rows, of_rows, plain_rows, whole_scale
from tunedgemm.integrations.aiter.outputs import activated, float_dtype, output_dtype, written
from tunedgemm.ops.scale_order import ROW, SHUFFLED

if TYPE_CHECKING:
    import torch


def gemm_a16w16(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    y: torch.Tensor | None = None,
    config: Any = None,
    activation: str | None = None,
    skip_reduce: bool | None = False,
    kernel_type: str = "",
    backend: str | None = None,
) -> torch.Tensor:
    """Compute ``activation(x[..., K] @ w[N, K].T (+ bias))``; a dtype of None is bf16."""
    import torch

    import tunedgemm

    del config, skip_reduce, kernel_type, backend
    out = output_dtype(y, dtype)
    product = tunedgemm.gemm_a16w16(x, in_rows(w), bias, out if activation is None else torch.float32)
    return written(y, activated(product, activation).to(out))


def gemm_a16w16_atomic(
    x: torch.Tensor, w: torch.Tensor, dtype: torch.dtype | None = None, y: torch.Tensor | None = None, config: Any = None
) -> torch.Tensor:
    """Compute ``x[..., K] @ w[N, K].T``; y is overwritten, not added to."""
    return gemm_a16w16(x, w, None, dtype, y, config)


def gemm_a16w16_gated(
    x: torch.Tensor,
    w: torch.Tensor,
    dtype: torch.dtype | None = None,
    y: torch.Tensor | None = None,
    config: Any = None,
    activation: str | None = None,
) -> torch.Tensor:
    """Compute ``activation(first half) * second half`` of the columns of ``x[..., K] @ w[N, K].T``."""
    import torch

    del config
    gate, up = gemm_a16w16(x, w, None, torch.float32).chunk(2, dim=-1)
    return written(y, (activated(gate, activation) * up).to(output_dtype(y, dtype)))


def gemm_a8w8(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    y: torch.Tensor | None = None,
    config: Any = None,
    skip_reduce: bool | None = False,
) -> torch.Tensor:
    """Compute ``(x @ w.T) * x_scale * w_scale (+ bias)`` with one scale for each row of x and w.

    e5m2 is converted to bf16 in each call, exactly; an output of integers is cut off.
    """
    import torch

    import tunedgemm

    del config, skip_reduce
    out = output_dtype(y, dtype)
    if x.dtype in (torch.float8_e5m2, torch.float8_e5m2fnuz):
        product = gemm_a16w16(x.to(torch.bfloat16), w.to(torch.bfloat16), None, torch.float32) * x_scale.view(-1, 1) * w_scale.view(1, -1)
        product = product if bias is None else product + bias
    else:
        product = tunedgemm.gemm_a8w8(x, in_rows(w), x_scale, w_scale, bias, float_dtype(out))
    return written(y, product.to(out))


def gemm_a8w8_preshuffle(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    y: torch.Tensor | None = None,
    config: Any = None,
) -> torch.Tensor:
    """Compute `gemm_a8w8` of a shuffled weight, given as [N/16, K*16]."""
    import tunedgemm

    del config
    out = output_dtype(y, dtype)
    product = tunedgemm.gemm_a8w8_bpreshuffle(x, of_rows(w, x.shape[-1]), x_scale, w_scale, bias, float_dtype(out))
    return written(y, product.to(out))


def gemm_a8w8_per_token_scale(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    dtype: torch.dtype | None = None,
    y: torch.Tensor | None = None,
    config: Any = None,
) -> torch.Tensor:
    """Compute ``(x @ w.T) * x_scale * w_scale``, as `gemm_a8w8`."""
    return gemm_a8w8(x, w, x_scale, w_scale, None, dtype, y, config)


def gemm_a8w8_blockscale(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    dtype: torch.dtype | None = None,
    y: torch.Tensor | None = None,
    config: Any = None,
    skip_reduce: bool | None = False,
    kernel_type: str = "",
    backend: str | None = None,
) -> torch.Tensor:
    """Compute ``x @ w.T`` with scales of 1x128 and 128x128 blocks."""
    import tunedgemm

    del config, skip_reduce, kernel_type, backend
    return written(y, tunedgemm.gemm_a8w8_blockscale(x, in_rows(w), x_scale, w_scale, output_dtype(y, dtype)))


def gemm_a8w8_blockscale_preshuffle(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    dtype: torch.dtype | None = None,
    y: torch.Tensor | None = None,
    config: Any = None,
    skip_reduce: bool | None = False,
    is_x_scale_tranposed: bool | None = True,
    kernel_type: str = "",
    backend: str | None = None,
) -> torch.Tensor:
    """Compute `gemm_a8w8_blockscale` of a shuffled weight, given as [N/16, K*16]."""
    import tunedgemm

    del config, skip_reduce, kernel_type, backend
    scale = x_scale if is_x_scale_tranposed else tunedgemm.transposed_scale(x_scale)
    product = tunedgemm.gemm_a8w8_blockscale_bpreshuffle(x, of_rows(w, x.shape[-1]), scale, w_scale, output_dtype(y, dtype))
    return written(y, product)


def gemm_a16w8_blockscale(
    x: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    dtype: torch.dtype | None = None,
    y: torch.Tensor | None = None,
    prequant: bool | None = False,
    config: Any = None,
    skip_reduce: bool | None = False,
) -> torch.Tensor:
    """Compute ``x @ w.T`` of bf16 and fp8; with prequant x is quantised by 1x128 first."""
    import tunedgemm

    del config, skip_reduce
    if prequant:
        xq, x_scale = tunedgemm.per_1x128_quant(x, w.dtype)
        return gemm_a8w8_blockscale(xq, w, x_scale, w_scale, dtype, y)
    return gemm_a16w16(x, tunedgemm.dequant_blocks(w, as_float(w_scale), x.dtype, (128, 128)), None, dtype, y)


def gemm_a16w8_blockscale_preshuffle(
    x: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    dtype: torch.dtype | None = None,
    y: torch.Tensor | None = None,
    prequant: bool | None = False,
    config: Any = None,
    skip_reduce: bool | None = False,
) -> torch.Tensor:
    """Compute `gemm_a16w8_blockscale` of a shuffled weight [N/16, K*16], unshuffled in each call."""
    return gemm_a16w8_blockscale(x, plain_rows(w, x.shape[-1]), w_scale, dtype, y, prequant, config, skip_reduce)


def gemm_a16wfp4(
    x: torch.Tensor,
    w: torch.Tensor,
    w_scales: torch.Tensor,
    atomic_add: bool | None = False,
    dtype: torch.dtype | None = None,
    y: torch.Tensor | None = None,
    config: Any = None,
) -> torch.Tensor:
    """Compute ``x @ w.T`` of bf16 and mxfp4; x is not rounded to mxfp4 as in AITER."""
    import tunedgemm

    return written(y, tunedgemm.gemm_a16wfp4(x, in_rows(w), w_scales, atomic_add, output_dtype(y, dtype), None, config, scale_order=ROW))


def gemm_afp4wfp4_pre_quant(
    x: torch.Tensor,
    w: torch.Tensor,
    w_scales: torch.Tensor,
    dtype: torch.dtype | None = None,
    y: torch.Tensor | None = None,
    config: Any = None,
) -> torch.Tensor:
    """Compute ``x @ w.T`` as `gemm_a16wfp4`."""
    return gemm_a16wfp4(x, w, w_scales, True, dtype, y, config)


def gemm_a16wfp4_preshuffle(
    x: torch.Tensor,
    w: torch.Tensor,
    w_scales: torch.Tensor,
    prequant: bool | None = True,
    dtype: torch.dtype | None = None,
    y: torch.Tensor | None = None,
    config: Any = None,
    skip_reduce: bool | None = False,
) -> torch.Tensor:
    """Compute `gemm_a16wfp4` of a shuffled weight [N/16, K*8] with shuffled scales [N/32, K]."""
    import tunedgemm

    del prequant, config, skip_reduce
    weight, dtype = of_rows(w, x.shape[-1] // 2), output_dtype(y, dtype)
    scales = whole_scale(w_scales, x.shape[-1])
    return written(y, tunedgemm.gemm_a16wfp4(x, weight, scales, dtype=dtype, bpreshuffle=True, scale_order=SHUFFLED))


def gemm_a8wfp4(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    x_scales: torch.Tensor,
    w_scales: torch.Tensor,
    dtype: torch.dtype | None = None,
    config: Any = None,
) -> torch.Tensor:
    """Write ``(x @ w.T) * x_scales`` of fp8 and mxfp4 to y."""
    import torch

    import tunedgemm

    del dtype, config
    product = tunedgemm.gemm_a16wfp4(x.to(torch.bfloat16), in_rows(w), w_scales, dtype=torch.float32, scale_order=ROW)
    return written(y, product * x_scales.reshape(-1, 1))


def gemm_afp4wfp4(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scales: torch.Tensor,
    w_scales: torch.Tensor,
    dtype: torch.dtype | None = None,
    y: torch.Tensor | None = None,
    config: Any = None,
    skip_reduce: bool | None = False,
) -> torch.Tensor:
    """Compute ``x @ w.T`` of mxfp4 with plain weights and plain scales."""
    del config, skip_reduce
    return _product(x, w, x_scales, w_scales, output_dtype(y, dtype), y, ROW)


def _product(
    x: torch.Tensor, w: torch.Tensor, x_scales: torch.Tensor, w_scales: torch.Tensor, dtype: torch.dtype, y: torch.Tensor | None, order: str
) -> torch.Tensor:
    """Multiply mxfp4 operands with scales of one order."""
    import tunedgemm
    from tunedgemm.ops.formats.shuffle import ShuffledWeight

    is_shuffled = isinstance(w, ShuffledWeight)
    return written(y, tunedgemm.gemm_a4w4(x, in_rows(w), x_scales, w_scales, dtype=dtype, bpreshuffle=is_shuffled, scale_order=order))


def gemm_afp4wfp4_preshuffled_scales(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scales: torch.Tensor,
    w_scales: torch.Tensor,
    dtype: torch.dtype | None = None,
    y: torch.Tensor | None = None,
    config: Any = None,
) -> torch.Tensor:
    """Compute `gemm_afp4wfp4` with shuffled scales [M/32, K] and [N/32, K]."""
    del config
    k = 2 * x.shape[-1]
    return _product(x, w, whole_scale(x_scales, k), whole_scale(w_scales, k), output_dtype(y, dtype), y, SHUFFLED)


def gemm_afp4wfp4_preshuffle(
    x_fp4: torch.Tensor,
    w_preshuf: torch.Tensor,
    x_scales: torch.Tensor,
    w_scales: torch.Tensor,
    dtype: torch.dtype | None = None,
    y: torch.Tensor | None = None,
    config: Any = None,
    skip_reduce: bool | None = False,
) -> torch.Tensor:
    """Compute ``x @ w.T`` of a shuffled weight [N/16, K*8] with shuffled scales [N/32, K].

    The scales of x are shuffled, too, [M/32, K]; those of fewer than 32 rows are plain.
    """
    import tunedgemm

    del config, skip_reduce
    m, half = x_fp4.shape
    scale = tunedgemm.shuffle_scale(x_scales) if x_scales.shape == (m, half // 16) else whole_scale(x_scales, 2 * half)
    return _product(x_fp4, of_rows(w_preshuf, half), scale, whole_scale(w_scales, 2 * half), output_dtype(y, dtype), y, SHUFFLED)


def gemm_afp4wfp4_preshuffled_weight_scales(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scales: torch.Tensor,
    w_scales: torch.Tensor,
    dtype: torch.dtype | None = None,
    y: torch.Tensor | None = None,
    config: Any = None,
) -> torch.Tensor:
    """Compute `gemm_afp4wfp4_preshuffle`, which this is another name of."""
    return gemm_afp4wfp4_preshuffle(x, w, x_scales, w_scales, dtype, y, config)


def gemm_afp8wfp8(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scales: torch.Tensor,
    w_scales: torch.Tensor,
    dtype: torch.dtype | None = None,
    y: torch.Tensor | None = None,
    config: Any = None,
    skip_reduce: bool | None = False,
) -> torch.Tensor:
    """Compute ``x @ w.T`` of fp8 with e8m0 scales of 1x32 and 128x128 blocks, dequantised in each call."""
    import torch

    import tunedgemm

    del config, skip_reduce
    fp8 = torch.float8_e4m3fn
    x16 = tunedgemm.dequant_blocks(x.view(fp8), as_float(x_scales), torch.bfloat16, (1, 32))
    w16 = tunedgemm.dequant_blocks(w.view(fp8), as_float(w_scales), torch.bfloat16, (128, 128))
    return gemm_a16w16(x16, w16, None, dtype, y)


def gemm_afp8wfp8_preshuffle(
    x: torch.Tensor,
    w_shuffled: torch.Tensor,
    x_scales: torch.Tensor,
    w_scales: torch.Tensor,
    dtype: torch.dtype | None = None,
    y: torch.Tensor | None = None,
    config: Any = None,
    skip_reduce: bool | None = False,
) -> torch.Tensor:
    """Compute `gemm_afp8wfp8` of a shuffled weight, which is unshuffled in each call."""
    return gemm_afp8wfp8(x, plain_rows(w_shuffled, x.shape[-1]), x_scales, w_scales, dtype, y, config, skip_reduce)
