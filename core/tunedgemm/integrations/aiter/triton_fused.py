"""AITER's fused Triton products: `aiter.ops.triton.gemm.fused` and `feed_forward`.

The products are those of the tables; what follows them is torch's. See `triton_basic`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunedgemm.integrations.aiter import triton_basic as basic
from tunedgemm.integrations.aiter.outputs import output_dtype, written

if TYPE_CHECKING:
    import torch


def ff_a16w16_nogate(
    x: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    dtype: torch.dtype | None = None,
    intermediate: torch.Tensor | None = None,
    y: torch.Tensor | None = None,
    config: Any = None,
    activation: str | None = None,
) -> torch.Tensor:
    """Compute ``activation(x @ w_up.T) @ w_down`` of [N, K] weights; w_down is transposed in each call."""
    hidden = basic.gemm_a16w16(x, w_up, None, dtype, intermediate, config, activation)
    return basic.gemm_a16w16(hidden, w_down.t().contiguous(), None, dtype, y, config)


def ff_a16w16_gated(
    x: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    dtype: torch.dtype | None = None,
    intermediate: torch.Tensor | None = None,
    y: torch.Tensor | None = None,
    config: Any = None,
    activation: str | None = None,
) -> torch.Tensor:
    """Compute ``(activation(gate) * up) @ w_down``, gate and up being the halves of ``x @ w_up.T``."""
    hidden = basic.gemm_a16w16_gated(x, w_up, dtype, intermediate, config, activation)
    return basic.gemm_a16w16(hidden, w_down.t().contiguous(), None, dtype, y, config)


def ff_a16w16_fused_ungated(
    x: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    dtype: torch.dtype | None = None,
    y: torch.Tensor | None = None,
    config: Any = None,
    activation: str | None = None,
) -> torch.Tensor:
    """Compute `ff_a16w16_nogate`."""
    return ff_a16w16_nogate(x, w_up, w_down, dtype, None, y, config, activation)


def ff_a16w16_fused_gated(
    x: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    dtype: torch.dtype | None = None,
    y: torch.Tensor | None = None,
    config: Any = None,
    activation: str | None = None,
) -> torch.Tensor:
    """Compute `ff_a16w16_gated`."""
    return ff_a16w16_gated(x, w_up, w_down, dtype, None, y, config, activation)


def fused_gemm_a8w8_blockscale_a16w16(
    x_fp8: torch.Tensor,
    w_fp8: torch.Tensor,
    x_fp8_scale: torch.Tensor,
    w_fp8_scale: torch.Tensor,
    x_bf16: torch.Tensor,
    w_bf16: torch.Tensor,
    bias_fp8: torch.Tensor | None = None,
    bias_bf16: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    y_fp8: torch.Tensor | None = None,
    y_bf16: torch.Tensor | None = None,
    skip_reduce: bool | None = False,
    config: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `gemm_a8w8_blockscale` and `gemm_a16w16`, each with its bias."""
    import torch

    del skip_reduce
    first = basic.gemm_a8w8_blockscale(x_fp8, w_fp8, x_fp8_scale, w_fp8_scale, torch.float32)
    return _with_bias(first, bias_fp8, dtype, y_fp8), basic.gemm_a16w16(x_bf16, w_bf16, bias_bf16, dtype, y_bf16, config)


def fused_gemm_afp4wfp4_a16w16(
    x_fp4: torch.Tensor,
    w_fp4: torch.Tensor,
    x_fp4_scale: torch.Tensor,
    w_fp4_scale: torch.Tensor,
    x_bf16: torch.Tensor,
    w_bf16: torch.Tensor,
    is_fp4_preshuffled: bool = True,
    bias_fp4: torch.Tensor | None = None,
    bias_bf16: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    y_fp4: torch.Tensor | None = None,
    y_bf16: torch.Tensor | None = None,
    skip_reduce: bool | None = False,
    config: Any = None,
    use_aot: bool | None = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `gemm_afp4wfp4_preshuffle`, or `gemm_afp4wfp4`, and `gemm_a16w16`, each with its bias."""
    import torch

    del skip_reduce, use_aot
    function = basic.gemm_afp4wfp4_preshuffle if is_fp4_preshuffled else basic.gemm_afp4wfp4
    first = function(x_fp4, w_fp4, x_fp4_scale, w_fp4_scale, torch.float32)
    return _with_bias(first, bias_fp4, dtype, y_fp4), basic.gemm_a16w16(x_bf16, w_bf16, bias_bf16, dtype, y_bf16, config)


def fused_gemm_a8w8_blockscale_mul_add(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scales: torch.Tensor,
    w_scales: torch.Tensor,
    a: torch.Tensor | float,
    b: torch.Tensor | float,
    dtype: torch.dtype | None = None,
    y: torch.Tensor | None = None,
    config: Any = None,
    fuse_type: int | None = 0,
) -> torch.Tensor:
    """Compute ``a * product + b``; with fuse_type 1 ``a * b + product``."""
    import torch

    return _mul_add(basic.gemm_a8w8_blockscale(x, w, x_scales, w_scales, torch.float32, None, config), a, b, dtype, y, fuse_type)


def fused_gemm_afp4wfp4_mul_add(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scales: torch.Tensor,
    w_scales: torch.Tensor,
    a: torch.Tensor | float,
    b: torch.Tensor | float,
    dtype: torch.dtype | None = None,
    y: torch.Tensor | None = None,
    config: Any = None,
    fuse_type: int | None = 0,
) -> torch.Tensor:
    """Compute ``a * product + b``; with fuse_type 1 ``a * b + product``."""
    import torch

    return _mul_add(basic.gemm_afp4wfp4(x, w, x_scales, w_scales, torch.float32, None, config), a, b, dtype, y, fuse_type)


def fused_gemm_afp4wfp4_preshuffle_add_mul(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scales: torch.Tensor,
    w_scales: torch.Tensor,
    a: torch.Tensor | float,
    b: torch.Tensor | float,
    dtype: torch.dtype | None = None,
    y: torch.Tensor | None = None,
    config: Any = None,
    use_aot: bool | None = True,
    fuse_type: int | None = 0,
) -> torch.Tensor:
    """Compute `fused_gemm_afp4wfp4_mul_add` of a shuffled weight and shuffled scales."""
    import torch

    del use_aot
    return _mul_add(basic.gemm_afp4wfp4_preshuffle(x, w, x_scales, w_scales, torch.float32, None, config), a, b, dtype, y, fuse_type)


def fused_gemm_a8w8_blockscale_split_cat(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    S1: int,
    S2: int,
    dtype: torch.dtype | None = None,
    config: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Split the product by S1 and S2 for each of y's D heads, and append y [M, D, S3] to the first part."""
    return _split_cat(basic.gemm_a8w8_blockscale(x, w, x_scale, w_scale, dtype, None, config), y, S1, S2)


def fused_gemm_a8w8_blockscale_preshuffle_split_cat(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    S1: int,
    S2: int,
    dtype: torch.dtype | None = None,
    config: Any = None,
    is_x_scale_transposed: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `fused_gemm_a8w8_blockscale_split_cat` of a shuffled weight."""
    product = basic.gemm_a8w8_blockscale_preshuffle(x, w, x_scale, w_scale, dtype, None, config, False, is_x_scale_transposed)
    return _split_cat(product, y, S1, S2)


def fused_gemm_afp4wfp4_split_cat(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    S1: int,
    S2: int,
    dtype: torch.dtype | None = None,
    config: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Split the product and append y, as `fused_gemm_a8w8_blockscale_split_cat`."""
    return _split_cat(basic.gemm_afp4wfp4(x, w, x_scale, w_scale, dtype, None, config), y, S1, S2)


def fused_gemm_afp4wfp4_preshuffle_split_cat(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    S1: int,
    S2: int,
    dtype: torch.dtype | None = None,
    config: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `fused_gemm_afp4wfp4_split_cat` of a shuffled weight and shuffled scales."""
    return _split_cat(basic.gemm_afp4wfp4_preshuffle(x, w, x_scale, w_scale, dtype, None, config), y, S1, S2)


def _with_bias(product: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype | None, y: torch.Tensor | None) -> torch.Tensor:
    return written(y, (product if bias is None else product + bias).to(output_dtype(y, dtype)))


def _mul_add(
    product: torch.Tensor,
    a: torch.Tensor | float,
    b: torch.Tensor | float,
    dtype: torch.dtype | None,
    y: torch.Tensor | None,
    fuse_type: int | None,
) -> torch.Tensor:
    factor, summand = (value if isinstance(value, float | int) else value.to(product.dtype) for value in (a, b))
    return written(y, (factor * summand + product if fuse_type else factor * product + summand).to(output_dtype(y, dtype)))


def _split_cat(product: torch.Tensor, y: torch.Tensor, first: int, second: int) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    head, tail = product.view(-1, y.shape[1], first + second).split([first, second], dim=-1)
    return torch.cat([head, y.to(head.dtype)], dim=-1), tail.contiguous()
