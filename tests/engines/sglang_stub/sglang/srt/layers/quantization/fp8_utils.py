"""SGLang's fp8 products, by torch, with its checks of what operands look like."""

from __future__ import annotations

import torch

#: Name and M of each product that SGLang multiplied itself.
multiplied: list[tuple[str, int]] = []


def fp8_scaled_mm(
    mat_a: torch.Tensor, mat_b: torch.Tensor, scales_a: torch.Tensor, scales_b: torch.Tensor, out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Multiply [M, K] by a view [K, N], with scales [M, 1], or a single one (0.5.23), and [N, 1]."""
    assert mat_b.stride(0) == 1 and (scales_a.shape == (len(mat_a), 1) or scales_a.numel() == 1)
    multiplied.append(("fp8_scaled_mm", len(mat_a)))
    out = (mat_a.float() * scales_a) @ (mat_b.float() * scales_b.reshape(1, -1))
    return (out if bias is None else out + bias).to(out_dtype)


def _by_blocks(
    name: str, x: torch.Tensor, weight: torch.Tensor, xs: torch.Tensor, ws: torch.Tensor, block_size: list[int], dtype: torch.dtype
) -> torch.Tensor:
    multiplied.append((name, len(x)))
    n, k = block_size
    scale = ws.repeat_interleave(n, 0).repeat_interleave(k, 1)[: weight.shape[0], : weight.shape[1]]
    return ((x.float() * xs.repeat_interleave(k, 1)[:, : x.shape[1]]) @ (weight.float() * scale).t()).to(dtype)


def w8a8_block_fp8_matmul_deepgemm(
    A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor, block_size: list[int], output_dtype: torch.dtype
) -> torch.Tensor:
    """Multiply with scales of x in columns, padded to a multiple of four."""
    assert As.stride() == (1, -(-len(A) // 4) * 4)
    return _by_blocks("deepgemm", A, B, As, Bs, block_size, output_dtype)


def w8a8_block_fp8_matmul_triton(
    A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor, block_size: list[int], output_dtype: torch.dtype = torch.float16
) -> torch.Tensor:
    """Multiply with scales of x in rows."""
    assert As.is_contiguous()
    return _by_blocks("triton", A, B, As, Bs, block_size, output_dtype)
