"""int4 quantisation as in AITER's a16wi4: two values per byte, one bf16 scale per 32 elements of K.

Scales are [K/32, N].
"""

from __future__ import annotations

import torch

from tunedgemm.errors import OperandError
from tunedgemm.ops.formats.quant import as_rows
from tunedgemm.ops.formats.shuffle import plain_weight

INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]  # not in the stubs
#: Elements of K per scale, and the largest quantised magnitude.
_GROUP, _LIMIT = 32, 7
#: Values per pack of AITER: the low nibbles hold the first half, the high nibbles the second.
_PACK = 8


def per_1x32_i4_quant(weight: torch.Tensor, group_size: int = _GROUP) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a weight to -7 to 7; name and results are AITER's.

    Args:
        weight: [..., N, K] of a float dtype of 16 bits or more; K a multiple of 32.
        group_size: 32.

    Returns:
        (q [..., N, K] torch.int8, scale [..., K/32, N] torch.bfloat16)

    Raises:
        OperandError: unsupported dtype, K or group_size.
    """
    as_rows(weight, dims=2)
    k = weight.shape[-1]
    if group_size != _GROUP or k % _GROUP:
        raise OperandError(f"int4 has one scale for {_GROUP} elements and K a multiple of that (got group_size={group_size}, K={k})")
    groups = weight.detach().to(torch.float32).view(*weight.shape[:-1], k // _GROUP, _GROUP)
    scale = groups.abs().amax(-1).clamp_(min=1e-6) / _LIMIT
    q = (groups / scale[..., None]).round_().clamp_(-_LIMIT, _LIMIT).to(torch.int8).view(weight.shape)
    return q, scale.transpose(-1, -2).contiguous().to(torch.bfloat16)


def pack_int8_to_packed_int4(x_shuf_i8: torch.Tensor) -> torch.Tensor:
    """Pack shuffled int8 values of -8 to 7 like AITER's function, 8 values into 4 bytes.

    Args:
        x_shuf_i8: a plain tensor, or the result of `shuffle_weight`.

    Returns:
        The bytes, flattened, as torch.int8.
    """
    low, high = (plain_weight(x_shuf_i8).contiguous().view(torch.uint8).view(-1, 2, _PACK // 2) & 15).unbind(1)
    return (low | (high << 4)).view(-1).view(torch.int8)


def unpack_shuffled_int4(packed: torch.Tensor) -> torch.Tensor:
    """Invert `pack_int8_to_packed_int4`: [..., K/2] to int8 [..., K]."""
    pairs = packed.view(torch.int8).view(*packed.shape[:-1], -1, _PACK // 2)
    return torch.cat([(pairs << 4) >> 4, pairs >> 4], -1).flatten(-2)


def shuffle_scale_for_int4(scale: torch.Tensor, group_size: int = _GROUP) -> torch.Tensor:
    """Reorder the scales [E, groups, N] of int4 experts for AITER's kernels.

    bf16 scales become [E, groups / 2, N, 2], with two groups of a row adjacent. Others are
    unchanged.
    """
    if group_size != _GROUP:
        raise OperandError(f"int4 has one scale for {_GROUP} elements (got group_size={group_size})")
    if scale.dtype is not torch.bfloat16:
        return scale.contiguous()
    experts, groups, rows = scale.shape
    return scale.view(experts, groups // 2, 2, rows).transpose(2, 3).contiguous()
