"""Quantise to mxfp4 and back: pure torch on CPU and GPU, without a synchronisation.

Rounding and the scales of groups without finite values are those of `tunedgemm.ops.formats.quant`.
"""

from __future__ import annotations

import math

import torch

from tunedgemm.errors import OperandError
from tunedgemm.ops.formats.quant import as_rows, slices, work_dtype
from tunedgemm.ops.formats.scales import E8M0, as_bytes, shuffle_scale

FP4 = torch.float4_e2m1fn_x2
#: Elements of K that share a scale in mxfp4, and the largest magnitude of e2m1.
_MX, _LARGEST = 32, 6.0
#: AITER's numbers of rounding a scale: the default, and up to the power of two of amax.
ROUND_UP, _CEIL = 1, 3
#: Number -> what amax is divided by, and what is added to its bits before they are cut: half a step
#: of e2m1's one bit of fraction.
_MODES = {0: (4.0, 0), ROUND_UP: (_LARGEST, 0), 2: (4.0, 1 << 21), _CEIL: (4.0, 0)}


def per_1x32_f4_quant(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    quant_dtype: torch.dtype = FP4,
    shuffle: bool = False,
    pack_dim: int = -1,
    round_mode: int = ROUND_UP,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to mxfp4: e2m1 values, ties to even, with one power of two for each 32 elements of a row.

    By default the scale is amax / 6 rounded up to a power of two (AITER's RoundUp, torchao's
    RCEIL), so nothing saturates.

    Args:
        x: [..., K] of a float dtype of 16 bits or more; K a multiple of 32.
        scale, quant_dtype: AITER's arguments: None, the scales being taken from the values, and
            torch.float4_e2m1fn_x2.
        shuffle: give the scales as `shuffle_scale` does, over all rows of x.
        pack_dim: -1; 0 quantises along the first dimension of [K, N].
        round_mode: AITER's number of how the power of two is found: 0 amax / 4 rounded down, 1 the
            default, 2 amax / 4 rounded to the nearest fp4 and then down, 3 amax / 4 rounded up.

    Returns:
        (q [..., K/2] torch.float4_e2m1fn_x2, the even element in the low nibble;
        scale [..., K/32] torch.float8_e8m0fnu, or shuffled [ceil256(rows), ceil8(K/32)]);
        with pack_dim=0 (q [K/2, N], scale [K/32, N]).

    Raises:
        OperandError: x is none of these, or a scale, another dtype or an unknown mode is given.
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
        # 1 / 2^(b - 127) has the exponent field 254 - b; a group that is not finite is multiplied
        # by 0
        inverse = (254 - power).clamp_(min=0).mul_(1 << 23).view(torch.float32)
        codes = _e2m1(values * inverse[..., None]).view(-1, k // 2, 2)
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
    """Return the values of mxfp4: e2m1 * 2^(byte - 127), byte 255 being NaN; rounded once to dtype.

    Args:
        q: [..., K/2], torch.float4_e2m1fn_x2 or torch.uint8, the even element in the low nibble.
        e8m0: [..., K/32] in plain order, torch.float8_e8m0fnu or torch.uint8.

    Returns:
        [..., K] of dtype.

    Raises:
        OperandError: the operands are none of these or do not fit together.
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
        values = _values(torch.stack((pairs & 15, pairs >> 4), -1).view(-1, k // _MX, _MX)).to(work_dtype(dtype))
        values *= powers[part].view(E8M0).to(torch.float32).to(values.dtype)[..., None]
        flat[part] = values.view(-1, k).to(dtype)
    return out


def _power(top: torch.Tensor, mode: int) -> torch.Tensor:
    """Return the e8m0 byte for an amax by one of AITER's modes."""
    limit, added = _MODES[mode]
    if mode in (ROUND_UP, _CEIL):
        return power_of(top, limit)
    bits = top.contiguous().view(torch.int32) & 0x7FFFFFFF
    field = (bits + added) >> 23
    return torch.where(field == 255, 255, (field - 2).clamp_(min=0))


def power_of(top: torch.Tensor, limit: float) -> torch.Tensor:
    """Return the e8m0 byte of amax / limit rounded up to a power of two, as int32.

    It is 255 for values that are not finite and 0 for zero. It is read off the bits of
    amax = f * 2^e: with limit = g * 2^h, f / g * 2^(e - h) rounds up to 2^(e - h) up to f = g,
    beyond to 2^(e - h + 1). A division on the device may multiply by the reciprocal instead, which
    is another number.
    """
    fraction_of_limit, exponent = math.frexp(limit)
    bits = top.contiguous().view(torch.int32) & 0x7FFFFFFF
    field, fraction = bits >> 23, bits & 0x7FFFFF
    threshold = int((2 * fraction_of_limit - 1) * (1 << 23))
    power = (field - (exponent - 1) + (fraction > threshold).to(torch.int32)).clamp_(min=1)
    # 3 units of the smallest subnormal and less vanish when divided by 6 or more
    return torch.where(field == 255, 255, torch.where(bits <= 3, 0, power))


def _e2m1(values: torch.Tensor) -> torch.Tensor:
    """Encode float32 values in 4 bits: sign, then 0, .5, 1, 1.5, 2, 3, 4, 6.

    Ties go to the even code, NaN to 0.
    """
    size = values.abs()
    code = torch.signbit(values).to(torch.uint8) << 3
    for half, even_below in ((0.25, True), (0.75, False), (1.25, True), (1.75, False), (2.5, True), (3.5, False), (5.0, True)):
        code += size > half if even_below else size >= half
    return code


def _values(codes: torch.Tensor) -> torch.Tensor:
    """Decode 4-bit codes to float32 without a table on the device.

    The bits of a normal code are those of a float, shifted.
    """
    size = (codes & 7).to(torch.int32)
    bits = torch.where(size > 1, (size + (126 << 1)) << 22, size * (126 << 23))
    return bits.view(torch.float32) * (1 - 2 * (codes >> 3).to(torch.float32))
