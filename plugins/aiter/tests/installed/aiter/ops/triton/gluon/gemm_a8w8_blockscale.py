"""Stand for AITER's product of fp8 by blocks in Gluon."""

from __future__ import annotations

import torch

from aiter.host import check, product


def gemm_a8w8_blockscale(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    dtype: float | None = torch.bfloat16,
    y: torch.Tensor | None = None,
    config: dict | None = None,
):
    (m, k), n = x.shape, w.shape[0]
    columns, rows = -(-k // 128), -(-n // 128)
    check("x", x, (m, k), torch.float8_e4m3fn)
    check("w", w, (n, k), x.dtype)
    check("x_scale", x_scale, (m, columns), torch.float32)
    check("w_scale", w_scale, (rows, columns), torch.float32)
    assert y is config is None
    wide = x_scale.repeat_interleave(128, 1)[:, :k], w_scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    return product(x.float() * wide[0], w.float() * wide[1]).to(dtype)
