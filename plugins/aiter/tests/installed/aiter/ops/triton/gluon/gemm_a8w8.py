"""Stand for AITER's 8-bit product in Gluon."""

from __future__ import annotations

import torch

from aiter.host import check, product


def gemm_a8w8(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: float | None = torch.bfloat16,
    y: torch.Tensor | None = None,
    config: dict | None = None,
):
    (m, k), n = x.shape, w.shape[0]
    check("x", x, (m, k), torch.float8_e4m3fn, torch.int8)
    check("w", w, (n, k), x.dtype)
    check("x_scale", x_scale, (m, 1), torch.float32)
    check("w_scale", w_scale, (1, n), torch.float32)
    assert bias is y is config is None
    return (product(x, w) * x_scale * w_scale).to(dtype)
