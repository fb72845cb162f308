"""List the lane-wise vector instructions: name, source kinds, result kind and function. Kinds are
letters of `operands.DTYPES`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Function = Callable[..., Any]


def _u(value: int) -> np.uint32:
    return np.uint32(value)


def _wide(first: Any, second: Any, dtype: type) -> Any:
    return np.asarray(first).astype(dtype) * np.asarray(second).astype(dtype)


def _high(first: Any, second: Any, dtype: type) -> Any:
    return (_wide(first, second, dtype) >> dtype(32)).astype(np.uint32 if dtype is np.uint64 else np.int32)


def _low24(value: Any) -> Any:
    return value & _u(0xFFFFFF)


def _signed24(value: Any) -> Any:
    return (np.asarray(value).view(np.uint32) << _u(8)).view(np.int32) >> np.int32(8)


def _shift(value: Any) -> Any:
    return value & _u(31)


def _fused(first: Any, second: Any, third: Any) -> Any:
    """Compute first * second + third with one rounding."""
    return (np.asarray(first, np.float64) * np.asarray(second, np.float64) + np.asarray(third, np.float64)).astype(np.float32)


def _permuted(first: Any, second: Any, selector: Any) -> Any:
    """Compute v_perm_b32: bytes 0-3 of the second, 4-7 of the first, 8-11 signs, 12 zero, 13 up
    0xff.
    """
    pool = (np.asarray(first).astype(np.uint64) << np.uint64(32)) | np.asarray(second).astype(np.uint64)
    out = np.zeros(np.broadcast(first, second, selector).shape, np.uint32)
    for at in range(4):
        pick = (np.asarray(selector) >> _u(8 * at)) & _u(0xFF)
        chosen = ((pool >> (np.minimum(pick, 7).astype(np.uint64) * np.uint64(8))) & np.uint64(0xFF)).astype(np.uint32)
        signs = (pool >> (((pick.astype(np.int64) - 8) * 2 + 1).clip(0, 7).astype(np.uint64) * np.uint64(8) + np.uint64(7))) & np.uint64(1)
        byte = np.where(pick < 8, chosen, np.where(pick < 12, signs.astype(np.uint32) * _u(0xFF), np.where(pick == 12, _u(0), _u(0xFF))))
        out |= byte << _u(8 * at)
    return out


def _aligned(first: Any, second: Any, bits: Any) -> Any:
    """Return the lower 32 bits of {first, second} shifted right."""
    return (((np.asarray(first).astype(np.uint64) << np.uint64(32)) | second) >> np.asarray(bits).astype(np.uint64)).astype(np.uint32)


def _field(value: Any, start: Any, width: Any) -> Any:
    return (value >> _shift(start)) & ((_u(1) << _shift(width)) - _u(1))


def _signed_field(value: Any, start: Any, width: Any) -> Any:
    bits = _shift(width)
    field = _field(np.asarray(value).view(np.uint32), start, width)
    sign = np.where(bits > 0, _u(1) << (bits - _u(1)), _u(0))
    return ((field ^ sign) - sign).view(np.int32)


def to_integer(value: Any, low: int, high: int, dtype: type) -> Any:
    """Round a float towards zero and clamp it; NaN becomes 0."""
    return (
        np.nan_to_num(np.trunc(np.asarray(value, np.float64)), nan=0.0, posinf=high, neginf=low)
        .clip(low, high)
        .astype(np.int64)
        .astype(dtype)
    )


def to_bf16(value: Any) -> Any:
    """Round a float to bf16, ties to even, as upper 16 bits; NaN stays quiet."""
    bits = np.asarray(value, np.float32).view(np.uint32)
    rounded = (bits + _u(0x7FFF) + ((bits >> _u(16)) & _u(1))) >> _u(16)
    return np.where(np.isnan(np.asarray(value)), (bits >> _u(16)) | _u(0x40), rounded)


def _half(value: Any) -> Any:
    return np.asarray(value).astype(np.float16).view(np.uint16).astype(np.uint32)


def _towards_zero(value: Any) -> Any:
    """Return the bits of a float16 rounded towards zero."""
    nearest = np.asarray(value, np.float32).astype(np.float16)
    over = np.abs(nearest.astype(np.float32)) > np.abs(value)
    return (nearest.view(np.uint16) - over.astype(np.uint16)).astype(np.uint32)


def _first_one(value: Any) -> Any:
    """Count leading zeros; all ones for zero."""
    wide = np.asarray(value).astype(np.float64)
    return np.where(value == 0, _u(0xFFFFFFFF), (31 - np.floor(np.log2(np.maximum(wide, 1)))).astype(np.uint32))


def _last_one(value: Any) -> Any:
    lowest = (np.asarray(value).astype(np.int64) & -np.asarray(value).astype(np.int64)).astype(np.float64)
    return np.where(value == 0, _u(0xFFFFFFFF), np.log2(np.maximum(lowest, 1)).astype(np.uint32))


def _ones(value: Any) -> Any:
    return np.unpackbits(np.atleast_1d(np.asarray(value)).view(np.uint8).reshape(-1, 4), axis=1).sum(axis=1).astype(np.uint32)


def _reversed(value: Any) -> Any:
    bits = np.unpackbits(np.atleast_1d(np.asarray(value)).view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    return np.packbits(bits[:, ::-1], axis=1, bitorder="little").view(np.uint32).reshape(-1)


def _median(first: Any, second: Any, third: Any) -> Any:
    return np.maximum(np.minimum(first, second), np.minimum(np.maximum(first, second), third))


#: Name without encoding -> kinds of sources, kind of the result, function.
TABLE: dict[str, tuple[str, str, Function]] = {
    "v_mov_b32": ("u", "u", lambda a: a),
    "v_mov_b64": ("U", "U", lambda a: a),
    "v_not_b32": ("u", "u", lambda a: ~a),
    "v_and_b32": ("uu", "u", lambda a, b: a & b),
    "v_or_b32": ("uu", "u", lambda a, b: a | b),
    "v_xor_b32": ("uu", "u", lambda a, b: a ^ b),
    "v_xnor_b32": ("uu", "u", lambda a, b: ~(a ^ b)),
    "v_add_u32": ("uu", "u", lambda a, b: a + b),
    "v_sub_u32": ("uu", "u", lambda a, b: a - b),
    "v_subrev_u32": ("uu", "u", lambda a, b: b - a),
    "v_add_i32": ("ii", "i", lambda a, b: a + b),
    "v_sub_i32": ("ii", "i", lambda a, b: a - b),
    "v_mul_lo_u32": ("uu", "u", lambda a, b: a * b),
    "v_mul_hi_u32": ("uu", "u", lambda a, b: _high(a, b, np.uint64)),
    "v_mul_hi_i32": ("ii", "i", lambda a, b: _high(a, b, np.int64)),
    "v_mul_u32_u24": ("uu", "u", lambda a, b: _low24(a) * _low24(b)),
    "v_mul_hi_u32_u24": ("uu", "u", lambda a, b: _high(_low24(a), _low24(b), np.uint64)),
    "v_mul_i32_i24": ("ii", "i", lambda a, b: _signed24(a) * _signed24(b)),
    "v_mad_u32_u24": ("uuu", "u", lambda a, b, c: _low24(a) * _low24(b) + c),
    "v_mad_i32_i24": ("iii", "i", lambda a, b, c: _signed24(a) * _signed24(b) + c),
    "v_lshlrev_b32": ("uu", "u", lambda a, b: b << _shift(a)),
    "v_lshrrev_b32": ("uu", "u", lambda a, b: b >> _shift(a)),
    "v_ashrrev_i32": ("ui", "i", lambda a, b: b >> _shift(a).astype(np.int32)),
    "v_lshlrev_b64": ("uU", "U", lambda a, b: b << (a & _u(63)).astype(np.uint64)),
    "v_lshrrev_b64": ("uU", "U", lambda a, b: b >> (a & _u(63)).astype(np.uint64)),
    "v_ashrrev_i64": ("uI", "I", lambda a, b: b >> (a & _u(63)).astype(np.int64)),
    "v_lshl_add_u32": ("uuu", "u", lambda a, b, c: (a << _shift(b)) + c),
    "v_add_lshl_u32": ("uuu", "u", lambda a, b, c: (a + b) << _shift(c)),
    "v_lshl_or_b32": ("uuu", "u", lambda a, b, c: (a << _shift(b)) | c),
    "v_and_or_b32": ("uuu", "u", lambda a, b, c: (a & b) | c),
    "v_or3_b32": ("uuu", "u", lambda a, b, c: a | b | c),
    "v_add3_u32": ("uuu", "u", lambda a, b, c: a + b + c),
    "v_xad_u32": ("uuu", "u", lambda a, b, c: (a ^ b) + c),
    "v_lshl_add_u64": ("UuU", "U", lambda a, b, c: (a << (b & _u(7)).astype(np.uint64)) + c),
    "v_bfe_u32": ("uuu", "u", _field),
    "v_bfe_i32": ("iuu", "i", _signed_field),
    "v_bfi_b32": ("uuu", "u", lambda a, b, c: (a & b) | (~a & c)),
    "v_bfm_b32": ("uu", "u", lambda a, b: ((_u(1) << _shift(a)) - _u(1)) << _shift(b)),
    "v_alignbit_b32": ("uuu", "u", lambda a, b, c: _aligned(a, b, c & _u(31))),
    "v_alignbyte_b32": ("uuu", "u", lambda a, b, c: _aligned(a, b, (c & _u(3)) * _u(8))),
    "v_perm_b32": ("uuu", "u", _permuted),
    "v_min_u32": ("uu", "u", np.minimum),
    "v_max_u32": ("uu", "u", np.maximum),
    "v_min_i32": ("ii", "i", np.minimum),
    "v_max_i32": ("ii", "i", np.maximum),
    "v_min3_u32": ("uuu", "u", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_u32": ("uuu", "u", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_min3_i32": ("iii", "i", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_i32": ("iii", "i", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_med3_i32": ("iii", "i", _median),
    "v_med3_u32": ("uuu", "u", _median),
    "v_ffbh_u32": ("u", "u", _first_one),
    "v_ffbl_b32": ("u", "u", _last_one),
    "v_bfrev_b32": ("u", "u", _reversed),
    "v_bcnt_u32_b32": ("uu", "u", lambda a, b: _ones(a) + b),
    "v_add_f32": ("ff", "f", lambda a, b: a + b),
    "v_sub_f32": ("ff", "f", lambda a, b: a - b),
    "v_subrev_f32": ("ff", "f", lambda a, b: b - a),
    "v_mul_f32": ("ff", "f", lambda a, b: a * b),
    "v_mul_legacy_f32": ("ff", "f", lambda a, b: np.where((a == 0) | (b == 0), np.float32(0), a * b)),
    "v_min_f32": ("ff", "f", np.fmin),
    "v_max_f32": ("ff", "f", np.fmax),
    "v_max3_f32": ("fff", "f", lambda a, b, c: np.fmax(np.fmax(a, b), c)),
    "v_min3_f32": ("fff", "f", lambda a, b, c: np.fmin(np.fmin(a, b), c)),
    "v_med3_f32": ("fff", "f", _median),
    "v_fma_f32": ("fff", "f", _fused),
    "v_rcp_f32": ("f", "f", lambda a: np.float32(1) / a),
    "v_rcp_iflag_f32": ("f", "f", lambda a: np.float32(1) / a),
    "v_rsq_f32": ("f", "f", lambda a: np.float32(1) / np.sqrt(a)),
    "v_sqrt_f32": ("f", "f", np.sqrt),
    "v_exp_f32": ("f", "f", np.exp2),
    "v_log_f32": ("f", "f", np.log2),
    "v_floor_f32": ("f", "f", np.floor),
    "v_ceil_f32": ("f", "f", np.ceil),
    "v_trunc_f32": ("f", "f", np.trunc),
    "v_rndne_f32": ("f", "f", np.rint),
    "v_fract_f32": ("f", "f", lambda a: a - np.floor(a)),
    "v_ldexp_f32": ("fi", "f", np.ldexp),
    "v_cvt_f32_u32": ("u", "f", lambda a: a.astype(np.float32)),
    "v_cvt_f32_i32": ("i", "f", lambda a: a.astype(np.float32)),
    "v_cvt_u32_f32": ("f", "u", lambda a: to_integer(a, 0, 0xFFFFFFFF, np.uint32)),
    "v_cvt_i32_f32": ("f", "i", lambda a: to_integer(a, -(1 << 31), (1 << 31) - 1, np.int32)),
    "v_cvt_f32_f16": ("h", "f", lambda a: a.astype(np.float32)),
    "v_cvt_f16_f32": ("f", "u", _half),
    "v_cvt_f32_f64": ("F", "f", lambda a: a.astype(np.float32)),
    "v_cvt_f64_f32": ("f", "F", lambda a: a.astype(np.float64)),
    "v_cvt_pkrtz_f16_f32": ("ff", "u", lambda a, b: _towards_zero(a) | (_towards_zero(b) << _u(16))),
    "v_cvt_pk_bf16_f32": ("ff", "u", lambda a, b: to_bf16(a) | (to_bf16(b) << _u(16))),
    "v_pack_b32_f16": ("HH", "u", lambda a, b: a.astype(np.uint32) | (b.astype(np.uint32) << _u(16))),
    "v_add_u16": ("HH", "H", lambda a, b: a + b),
    "v_sub_u16": ("HH", "H", lambda a, b: a - b),
    "v_mul_lo_u16": ("HH", "H", lambda a, b: a * b),
    "v_lshlrev_b16": ("HH", "H", lambda a, b: b << (a & np.uint16(15))),
    "v_lshrrev_b16": ("HH", "H", lambda a, b: b >> (a & np.uint16(15))),
}  # fmt: skip
#: Transcendental instructions, whose result the next instruction may not use (`hazards`).
TRANSCENDENTAL = {"v_rcp_f32", "v_rcp_iflag_f32", "v_rsq_f32", "v_sqrt_f32", "v_exp_f32", "v_log_f32"}
#: What only gfx950 has.
GFX950 = {"v_cvt_pk_bf16_f32"}

COMPARISONS: dict[str, Function] = {
    "f": lambda a, b: np.zeros(np.broadcast(a, b).shape, bool),
    "lt": lambda a, b: a < b, "eq": lambda a, b: a == b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b,
    "ne": lambda a, b: a != b, "ge": lambda a, b: a >= b, "t": lambda a, b: np.ones(np.broadcast(a, b).shape, bool),
    "lg": lambda a, b: (a < b) | (a > b), "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)), "u": lambda a, b: np.isnan(a) | np.isnan(b),
    "nge": lambda a, b: ~(a >= b), "nlg": lambda a, b: ~((a < b) | (a > b)), "ngt": lambda a, b: ~(a > b), "nle": lambda a, b: ~(a <= b),
    "neq": lambda a, b: ~(a == b), "nlt": lambda a, b: ~(a < b), "tru": lambda a, b: np.ones(np.broadcast(a, b).shape, bool),
}  # fmt: skip
COMPARED = {"i32": "i", "u32": "u", "f32": "f", "i64": "I", "u64": "U", "f64": "F", "i16": "S", "u16": "H", "f16": "h"}
