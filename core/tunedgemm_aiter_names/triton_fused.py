"""AITER's fused Triton products: `aiter.ops.triton.gemm.fused` and `feed_forward`.

The products are those of the tables; what follows them is torch's. See `triton_basic`.
"""

from __future__ import annotations

from functools import partial

import torch
import tunedgemm
from torch import Tensor

from tunedgemm_aiter_names import triton_basic as basic
from tunedgemm_aiter_names.outputs import output_dtype, written
from tunedgemm_aiter_names.signatures import Product, functions


def feed_forward(
    product: Product,
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    dtype: torch.dtype | None,
    y: Tensor | None,
    activation: str | None,
    intermediate: Tensor | None = None,
) -> Tensor:
    """Compute ``product(x, w_up) @ w_down`` of [N, K] weights; w_down is transposed in each call.

    The product is ``activation(x @ w_up.T)``, or gated: ``activation(first half) * second half``.
    """
    hidden = written(intermediate, product(x, w_up, output_dtype(intermediate, dtype), activation=activation))
    return written(y, basic.a16w16(hidden, w_down.t().contiguous(), output_dtype(y, dtype)))


def pair(
    products: tuple[Product, ...],
    x: Tensor,
    w: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    x_bf16: Tensor,
    w_bf16: Tensor,
    bias: Tensor | None,
    bias_bf16: Tensor | None,
    dtype: torch.dtype | None,
    y: Tensor | None,
    y_bf16: Tensor | None,
    is_fp4_preshuffled: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the product of quantised operands, and `gemm_a16w16`, each with its bias.

    Args:
        products: of plain operands, and of shuffled ones.
    """
    first = products[bool(is_fp4_preshuffled)](x, w, x_scale, w_scale, torch.float32)
    first = written(y, (first if bias is None else first + bias).to(output_dtype(y, dtype)))
    return first, written(y_bf16, basic.a16w16(x_bf16, w_bf16, output_dtype(y_bf16, dtype), bias_bf16))


def mul_add(
    product: Product,
    x: Tensor,
    w: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    a: Tensor | float,
    b: Tensor | float,
    dtype: torch.dtype,
    fuse_type: int | None,
) -> Tensor:
    """Compute ``a * product + b``; with fuse_type 1 ``a * b + product``."""
    plain = product(x, w, x_scale, w_scale, torch.float32)
    factor, summand = (value if isinstance(value, float | int) else value.to(plain.dtype) for value in (a, b))
    return (factor * summand + plain if fuse_type else factor * plain + summand).to(dtype)


def split_cat(
    product: Product,
    x: Tensor,
    w: Tensor,
    y: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    S1: int,
    S2: int,
    dtype: torch.dtype | None,
    is_x_scale_transposed: bool = True,
) -> tuple[Tensor, Tensor]:
    """Split the product by S1 and S2 for each of y's D heads, and append y [M, D, S3] to the first part."""
    scale = x_scale if is_x_scale_transposed else tunedgemm.transposed_scale(x_scale)
    plain = product(x, w, scale, w_scale, output_dtype(None, dtype))
    head, tail = plain.view(-1, y.shape[1], S1 + S2).split([S1, S2], dim=-1)
    return torch.cat([head, y.to(head.dtype)], dim=-1), tail.contiguous()


_UP_AND_DOWN = "x, w_up, w_down, dtype=None, intermediate=None, y=None, config=None, activation=None"
_UP_AND_DOWN_FUSED = "x, w_up, w_down, dtype=None, y=None, config=None, activation=None"
_MUL_ADD = "x, w, x_scales, w_scales, a, b, dtype=None, y=None, config=None, fuse_type=0"
_SPLIT_CAT = "x, w, y, x_scale, w_scale, S1, S2, dtype=None, config=None"

globals().update(functions(__name__, {
    partial(feed_forward, basic.a16w16): {"ff_a16w16_nogate": _UP_AND_DOWN, "ff_a16w16_fused_ungated": _UP_AND_DOWN_FUSED},
    partial(feed_forward, basic.a16w16_gated): {"ff_a16w16_gated": _UP_AND_DOWN, "ff_a16w16_fused_gated": _UP_AND_DOWN_FUSED},
    partial(pair, (basic.a8w8_blockscale,)): {
        "fused_gemm_a8w8_blockscale_a16w16":
            "x_fp8, w_fp8, x_fp8_scale, w_fp8_scale, x_bf16, w_bf16, bias_fp8=None, bias_bf16=None, dtype=None, y_fp8=None, y_bf16=None, "
            "skip_reduce=False, config=None",
    },
    partial(pair, (basic.afp4wfp4, basic.afp4wfp4_preshuffle)): {
        "fused_gemm_afp4wfp4_a16w16":
            "x_fp4, w_fp4, x_fp4_scale, w_fp4_scale, x_bf16, w_bf16, is_fp4_preshuffled=True, bias_fp4=None, bias_bf16=None, dtype=None, "
            "y_fp4=None, y_bf16=None, skip_reduce=False, config=None, use_aot=True",
    },
    partial(mul_add, basic.a8w8_blockscale): {"fused_gemm_a8w8_blockscale_mul_add": _MUL_ADD},
    partial(mul_add, basic.afp4wfp4): {"fused_gemm_afp4wfp4_mul_add": _MUL_ADD},
    partial(mul_add, basic.afp4wfp4_preshuffle): {
        "fused_gemm_afp4wfp4_preshuffle_add_mul":
            "x, w, x_scales, w_scales, a, b, dtype=None, y=None, config=None, use_aot=True, fuse_type=0",
    },
    partial(split_cat, basic.a8w8_blockscale): {"fused_gemm_a8w8_blockscale_split_cat": _SPLIT_CAT},
    partial(split_cat, basic.a8w8_blockscale_preshuffle): {
        "fused_gemm_a8w8_blockscale_preshuffle_split_cat": f"{_SPLIT_CAT}, is_x_scale_transposed=True",
    },
    partial(split_cat, basic.afp4wfp4): {"fused_gemm_afp4wfp4_split_cat": _SPLIT_CAT},
    partial(split_cat, basic.afp4wfp4_preshuffle): {"fused_gemm_afp4wfp4_preshuffle_split_cat": _SPLIT_CAT},
}))  # fmt: skip
