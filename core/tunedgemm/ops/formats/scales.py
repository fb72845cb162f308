"""Order the e8m0 scales of mxfp4 as AITER's kernels read them, and back."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from tunedgemm.errors import OperandError

E8M0 = torch.float8_e8m0fnu
#: The byte of the scale 1.
ONE = 127
#: A shuffled e8m0 scale is padded to multiples of these rows and columns (AITER's e8m0_shuffle).
_SCALE_TILE = (256, 8)


def shuffle_scale(scale: torch.Tensor) -> torch.Tensor:
    """Return the e8m0 scales of mxfp4 in the order of AITER's kernels.

    This is AITER's e8m0_shuffle (aiter/ops/shuffle.py). Rows are padded to a multiple of 256 and
    columns to one of 8, with the scale 1. Of each 32 rows and 8 columns, the element
    ``(a * 16 + r, b * 4 + c)`` goes to place ``((c * 16 + r) * 2 + b) * 2 + a``.

    Args:
        scale: [rows, K/32], torch.float8_e8m0fnu or torch.uint8.

    Returns:
        [ceil256(rows), ceil8(K/32)] of the same dtype.

    Raises:
        OperandError: scale has another dtype or number of dimensions.
    """
    plain = as_bytes(scale, E8M0, "e8m0 scales")
    if plain.dim() != 2:
        raise OperandError(f"scales are shuffled as [rows, K/32] (got shape {tuple(plain.shape)}); flatten the leading dimensions")
    rows, cols = plain.shape
    full = pad(plain, (0, -cols % _SCALE_TILE[1], 0, -rows % _SCALE_TILE[0]), value=ONE)
    tiles = full.view(full.shape[0] // 32, 2, 16, full.shape[1] // 8, 2, 4)
    return tiles.permute(0, 3, 5, 2, 4, 1).contiguous().view(full.shape).view(scale.dtype)


def unshuffle_scale(scale: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Invert `shuffle_scale`: the first rows and columns, in order, contiguous.

    Args:
        scale: [ceil256(rows), ceil8(cols)] as `shuffle_scale` gives it, or more.
        rows, cols: of the plain scale.

    Raises:
        OperandError: scale is not a shuffled scale of that many rows and columns.
    """
    plain = as_bytes(scale, E8M0, "e8m0 scales")
    high, wide = _SCALE_TILE
    if plain.dim() != 2 or plain.shape[0] % 32 or plain.shape[1] % wide or rows > plain.shape[0] or cols > plain.shape[1]:
        raise OperandError(
            f"a shuffled scale of [{rows}, {cols}] is [{-(-rows // high) * high}, {-(-cols // wide) * wide}] (got {tuple(scale.shape)})"
        )
    tiles = plain.reshape(plain.shape[0] // 32, plain.shape[1] // 8, 4, 16, 2, 2)
    return tiles.permute(0, 5, 3, 1, 4, 2).reshape(plain.shape)[:rows, :cols].contiguous().view(scale.dtype)


def as_bytes(x: torch.Tensor, dtype: torch.dtype, what: str) -> torch.Tensor:
    """Return a tensor of *dtype*, or of its bytes, as uint8; raise OperandError for another dtype."""
    if x.dtype not in (dtype, torch.uint8):
        raise OperandError(f"{what} are {dtype} or torch.uint8 (got {x.dtype})")
    return x.detach().view(torch.uint8)
