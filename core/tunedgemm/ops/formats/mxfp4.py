"""mxfp4 quantisation and dequantisation in torch, on CPU and GPU, without synchronisation.

Zero and non-finite groups are treated as in `tunedgemm.ops.formats.quant`.
"""

from __future__ import annotations

import math

import torch

from tunedgemm.errors import OperandError
from tunedgemm.ops.formats.quant import as_rows, slices, work_dtype
from tunedgemm.ops.formats.scales import E8M0, as_bytes, shuffle_scale

FP4 = torch.float4_e2m1fn_x2
#: Elements of K per scale in mxfp4, and the largest magnitude of e2m1.
_MX, _LARGEST = 32, 6.0
#: AITER's rounding modes of the scale: the default (amax / 6 up), and amax / 4 up.
ROUND_UP, _CEIL = 1, 3
#: Rounding mode -> divisor of amax, and the rounding term added to its bits before truncation.
_MODES = {0: (4.0, 0), ROUND_UP: (_LARGEST, 0), 2: (4.0, 1 << 21), _CEIL: (4.0, 0)}


def per_1x32_f4_quant(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    quant_dtype: torch.dtype = FP4,
    shuffle: bool = False,
    pack_dim: int = -1,
    round_mode: int = ROUND_UP,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to mxfp4: e2m1 values, ties to even, with one e8m0 scale per 32 elements of K.

    By default the scale is amax / 6 rounded up to a power of two (AITER's RoundUp, torchao's
    RCEIL), so nothing saturates.

    Args:
        x: [..., K] of a float dtype of 16 bits or more; K a multiple of 32.
        scale, quant_dtype: must be None and torch.float4_e2m1fn_x2.
        shuffle: return the scales in the order of `shuffle_scale`, over all rows of x.
        pack_dim: -1, or 0 to quantise along the first dimension of [K, N].
        round_mode: AITER's rounding of the scale to a power of two: 0 amax / 4 down, 1 the
            default, 2 amax / 4 to the nearest fp4 and then down, 3 amax / 4 up.

    Returns:
        (q [..., K/2] torch.float4_e2m1fn_x2, the even element in the low nibble;
        scale [..., K/32] torch.float8_e8m0fnu, or shuffled [ceil256(rows), ceil8(K/32)]);
        with pack_dim=0 (q [K/2, N], scale [K/32, N]).

    Raises:
        OperandError: x or an argument is not supported.
    """
    if scale is not None or quant_dtype is not FP4:
        arguments = f"scale {type(scale).__name__}, quant_dtype {quant_dtype}"
        raise OperandError(f"per_1x32_f4_quant takes its scales from the values and gives {FP4} (got {arguments})")
    if pack_dim == 0 and x.dim() == 2 and not shuffle:
        turned = per_1x32_f4_quant(x.t().contiguous(), round_mode=round_mode)
        q, powers = (part.view(torch.uint8).t().contiguous().view(part.dtype) for part in turned)
        return q, powers
    if pack_dim != -1 or int(round_mode) not in _MODES:
        raise OperandError(
            f"per_1x32_f4_quant: pack_dim is -1, or 0 of [K, N] without shuffle, and round_mode {', '.join(map(str, _MODES))} "
            f"(got pack_dim={pack_dim}, shape {tuple(x.shape)}, round_mode={round_mode!r})"
        )
    rows = as_rows(x)
    k = x.shape[-1]
    if k % _MX:
        raise OperandError(f"mxfp4 has one scale for each {_MX} elements: K must be a multiple of {_MX} (got K={k}); pad K with zeros")
    q = torch.empty(rows.shape[0], k // 2, dtype=torch.uint8, device=x.device)
    scale = torch.empty(rows.shape[0], k // _MX, dtype=torch.uint8, device=x.device)
    for part in slices(*rows.shape):
        values = rows[part].to(torch.float32).view(-1, k // _MX, _MX)
        power = _power(values.abs().amax(-1), int(round_mode))
        scale[part] = power.to(torch.uint8)
        # 1 / 2^(b - 127) has the exponent field 254 - b; a non-finite group is multiplied by 0
        inverse = (254 - power).clamp_(min=0).mul_(1 << 23).view(torch.float32)
        codes = e2m1_codes(values * inverse[..., None]).view(-1, k // 2, 2)
        q[part] = codes[..., 0] | (codes[..., 1] << 4)
    if shuffle:
        return as_fp4(q.view(*x.shape[:-1], k // 2)), shuffle_scale(scale.view(E8M0))
    return as_fp4(q.view(*x.shape[:-1], k // 2)), scale.view(*x.shape[:-1], k // _MX).view(E8M0)


def as_fp4(q: torch.Tensor) -> torch.Tensor:
    """View [..., K/2] bytes as torch.float4_e2m1fn_x2, the same memory.

    Raises:
        OperandError: q is of another dtype.
    """
    return as_bytes(q, FP4, "two e2m1 values a byte").view(FP4)


def dequant_fp4(q: torch.Tensor, e8m0: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Dequantise mxfp4: e2m1 * 2^(byte - 127), NaN for byte 255; rounded once to *dtype*.

    Args:
        q: [..., K/2], torch.float4_e2m1fn_x2 or torch.uint8, the even element in the low nibble.
        e8m0: [..., K/32] row-major, torch.float8_e8m0fnu or torch.uint8.

    Returns:
        [..., K] of dtype.

    Raises:
        OperandError: an operand has another dtype, or their sizes do not match.
    """
    codes, bytes_ = as_bytes(q, FP4, "two e2m1 values a byte"), as_bytes(e8m0, E8M0, "e8m0 scales")
    k = 2 * q.shape[-1] if q.dim() else 0
    if not k or k % _MX or tuple(e8m0.shape) != (*q.shape[:-1], k // _MX):
        fits = f"{[*q.shape[:-1], k // _MX]}" if k % _MX == 0 else f"none: K={k} is no multiple of {_MX}"
        raise OperandError(
            f"e8m0 scales of fp4 values {tuple(q.shape)}: {fits} (got {tuple(e8m0.shape)}); unshuffle_scale(s, rows, K/32) first"
        )
    rows, powers = codes.reshape(-1, k // 2), bytes_.reshape(-1, k // _MX)
    out = torch.empty(*q.shape[:-1], k, dtype=dtype, device=q.device)
    flat = out.view(-1, k)
    for part in slices(rows.shape[0], k):
        pairs = rows[part]
        values = e2m1_values(torch.stack((pairs & 15, pairs >> 4), -1).view(-1, k // _MX, _MX)).to(work_dtype(dtype))
        values *= powers[part].view(E8M0).to(torch.float32).to(values.dtype)[..., None]
        flat[part] = values.view(-1, k).to(dtype)
    return out


def _power(top: torch.Tensor, mode: int) -> torch.Tensor:
    """Return the e8m0 byte of an amax in one of AITER's rounding modes."""
    limit, added = _MODES[mode]
    if mode in (ROUND_UP, _CEIL):
        return power_of(top, limit)
    bits = top.contiguous().view(torch.int32) & 0x7FFFFFFF
    field = (bits + added) >> 23
    return torch.where(field == 255, 255, (field - 2).clamp_(min=0))


def power_of(top: torch.Tensor, limit: float) -> torch.Tensor:
    """Return the e8m0 byte of amax / limit rounded up to a power of two, as int32.

    It is 255 for non-finite values and 0 for zero. It is computed from the bits of
    amax = f * 2^e and limit = g * 2^h: the exponent is e - h if f <= g, else e - h + 1. A division
    on a GPU may multiply by the rounded reciprocal instead, with another result.
    """
    fraction_of_limit, exponent = math.frexp(limit)
    bits = top.contiguous().view(torch.int32) & 0x7FFFFFFF
    field, fraction = bits >> 23, bits & 0x7FFFFF
    threshold = int((2 * fraction_of_limit - 1) * (1 << 23))
    power = (field - (exponent - 1) + (fraction > threshold).to(torch.int32)).clamp_(min=1)
    # up to 3 times the smallest subnormal underflows when divided by 6 or more
    return torch.where(field == 255, 255, torch.where(bits <= 3, 0, power))


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """Encode float32 values in 4 bits: sign, then 0, .5, 1, 1.5, 2, 3, 4, 6.

    Ties go to the even code, NaN to 0.
    """
    size = values.abs()
    code = torch.signbit(values).to(torch.uint8) << 3
    for half, even_below in ((0.25, True), (0.75, False), (1.25, True), (1.75, False), (2.5, True), (3.5, False), (5.0, True)):
        code += size > half if even_below else size >= half
    return code


def e2m1_values(codes: torch.Tensor) -> torch.Tensor:
    """Decode 4-bit codes to float32 by shifting bits, without a look-up table on the device."""
    size = (codes & 7).to(torch.int32)
    bits = torch.where(size > 1, (size + (126 << 1)) << 22, size * (126 << 23))
    return bits.view(torch.float32) * (1 - 2 * (codes >> 3).to(torch.float32))
