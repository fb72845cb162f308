"""AITER's products whose arguments differ from ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def _declare_shuffled(weight: torch.Tensor) -> torch.Tensor:
    """Declare a plain weight as shuffled by (16, 16), as AITER's functions for shuffled weights read it."""
    from tunedgemm.ops.formats.shuffle import ShuffledWeight, as_shuffled

    return weight if isinstance(weight, ShuffledWeight) else as_shuffled(weight, (16, 16))


def gemm_a8w8_bpreshuffle(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    *rest: Any,
    **named: Any,
) -> torch.Tensor:
    """Call `tunedgemm.gemm_a8w8_bpreshuffle`; a plain WQ holds shuffled bytes, as in AITER."""
    import tunedgemm

    return tunedgemm.gemm_a8w8_bpreshuffle(XQ, _declare_shuffled(WQ), x_scale, w_scale, *rest, **named)  # type: ignore[no-any-return]


def gemm_a8w8_blockscale_bpreshuffle(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    *rest: Any,
    **named: Any,
) -> torch.Tensor:
    """Call `tunedgemm.gemm_a8w8_blockscale_bpreshuffle`; a plain WQ holds shuffled bytes, as in AITER."""
    import tunedgemm

    return tunedgemm.gemm_a8w8_blockscale_bpreshuffle(XQ, _declare_shuffled(WQ), x_scale, w_scale, *rest, **named)  # type: ignore[no-any-return]


def triton_gemm_a16w16(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    y: torch.Tensor | None = None,
    config: Mapping[str, Any] | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """Compute ``gemm_a16w16`` of ``aiter.ops.triton``: ``x[..., K] @ w[N, K].T (+ bias)``.

    Args:
        dtype: dtype of the output; None for bf16, AITER's default.
        config: accepted and ignored, because the table decides.
        y, activation: must be None.

    Raises:
        OperandError: the operands do not fit each other, or y or an activation is given.
    """
    import torch

    import tunedgemm
    from tunedgemm.errors import OperandError

    del config
    for argument, value in (("y", y), ("activation", activation)):
        if value is not None:
            raise OperandError(f"gemm_a16w16: {argument} is not supported; the output is a new tensor, without an activation")
    return tunedgemm.gemm_a16w16(x, w, bias, dtype or torch.bfloat16)  # type: ignore[no-any-return]
