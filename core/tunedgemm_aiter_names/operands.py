"""Weights and scales in the forms that AITER's functions take, as our ops take them."""

from __future__ import annotations

import torch
import tunedgemm
from torch import Tensor
from tunedgemm import ShuffledScale, ShuffledWeight, as_shuffled
from tunedgemm.integrations import OperandError, plain_bytes

#: Orders of e8m0 scales: row-major, and that of AITER's kernels.
ROW, SHUFFLED = "row", ShuffledScale.scale_order
#: The byte of the scale 1.
_ONE = 127


def shuffled(weight: Tensor) -> Tensor:
    """Declare a plain weight as shuffled by (16, 16), as AITER's functions for shuffled weights read it."""
    return weight if isinstance(weight, ShuffledWeight) else as_shuffled(weight, (16, 16))


def whole_scale(scale: Tensor, k: int) -> Tensor:
    """Return shuffled scales of a multiple of 32 rows as `shuffle_scale` gives them, of a multiple of 256.

    [rows/32, k], as AITER's Triton kernels take them, become [rows, k/32].

    Raises:
        OperandError: the scales are no multiple of 32 rows.
    """
    groups = -(-k // 32 // 8) * 8
    if scale.dim() == 2 and scale.shape[-1] == groups and scale.shape[0] % 256 == 0:
        return scale
    if scale.numel() % (32 * groups):
        raise OperandError(f"shuffled scales have a multiple of 32 rows of {groups} (got {tuple(scale.shape)}); shuffle_scale(s)")
    rows = plain_bytes(scale).reshape(-1, groups).view(torch.uint8)
    # The order is one of 32 rows each, so that further rows go behind.
    return torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[0] % 256), value=_ONE)


def of_rows(w: Tensor, k: int) -> Tensor:
    """Return a shuffled weight that is given as [N/16, 16 k] as a weight of rows of k elements."""
    return w if isinstance(w, ShuffledWeight) else shuffled(w.reshape(-1, k))


def plain_rows(w: Tensor, k: int) -> Tensor:
    """Return a shuffled weight that is given as [N/16, 16 k] in plain order, [N, k]."""
    return tunedgemm.unshuffle_weight(of_rows(w, k))


def as_float(scale: Tensor) -> Tensor:
    """Return e8m0 scales or their bytes as float32; float32 unchanged."""
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).to(torch.float32)


def in_rows(w: Tensor) -> Tensor:
    """Return a square weight [N, K] with the strides of rows, as AITER's Triton products take any.

    Our ops take the view of a square weight for one that was transposed by mistake.
    """
    return w.contiguous() if w.shape[0] == w.shape[1] else w
