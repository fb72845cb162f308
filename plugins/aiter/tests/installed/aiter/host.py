"""Check operands as AITER's functions do, and compute products in float32."""

from __future__ import annotations

import torch


def check(name: str, tensor: torch.Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Require a contiguous tensor of a shape and of one of the dtypes."""
    assert type(tensor) is torch.Tensor, f"{name}: got {type(tensor)}"
    assert tuple(tensor.shape) == shape, f"{name}: got {tuple(tensor.shape)} instead of {shape}"
    assert tensor.is_contiguous(), f"{name}: strides {tensor.stride()}"
    assert tensor.dtype in dtypes, f"{name}: got {tensor.dtype} instead of {dtypes}"


def unshuffled(weight: torch.Tensor) -> torch.Tensor:
    """Return the plain [N, K] weight of bytes that AITER's shuffle_weight orders by (16, 16)."""
    n, k = weight.shape
    whole = weight.view(torch.uint8).reshape(n // 16, k // 32, 2, 16, 16).permute(0, 3, 1, 2, 4)
    return whole.reshape(n, k).view(weight.dtype)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the product in float32, row by row, so that its bits do not depend on other rows."""
    wide = weight.float()
    return torch.stack([wide @ row for row in x.float()]) if len(x) else x.new_zeros((0, len(weight)), dtype=torch.float32)
