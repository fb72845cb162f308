"""AITER's quantising functions, and those that pick one by its kind."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import tunedgemm
from torch import Tensor
from tunedgemm.integrations import OperandError, per_1x32_f8_quant
from tunedgemm.plugin import UserError

from tunedgemm_aiter_names import dtypes
from tunedgemm_aiter_names.shuffle import shuffle_scale_a16w4, shuffle_weight_a16w4

Quantised = tuple[Tensor, Tensor | None]
E8M0, FP4 = torch.float8_e8m0fnu, torch.float4_e2m1fn_x2
#: AITER's number for scales of amax rounded to the nearest fp4.
_EVEN = 2


def get_torch_quant(qType: Any) -> Callable[..., Quantised]:
    """Return the torch function of a kind, with AITER's arguments; otherwise `get_quant`'s."""
    functions: dict[str, Callable[..., Quantised]] = {"per_Tensor": tunedgemm.per_tensor_quant, "per_Token": tunedgemm.pertoken_quant}
    return functions.get(_kind(qType)) or get_quant(qType)


def get_quant(qType: Any) -> Callable[..., Quantised]:
    """Return a kind's quantising function, with the arguments of AITER's ``get_hip_quant``.

    Args:
        qType: a member of `tunedgemm.QuantType`, or of an enum with the same names.

    Returns:
        ``f(x, scale=None, quant_dtype=int8, ...) -> (q, scale)``; for ``No`` x itself and None. The
        function of another kind raises UserError, as AITER's does.
    """
    return _FUNCTIONS.get(_kind(qType)) or functools.partial(_unknown, qType)


def _unknown(kind: Any, *_rest: Any, **_named: Any) -> Quantised:
    raise UserError(f"QuantType: no function quantises this kind (got {kind!r}); known: {', '.join(_FUNCTIONS)}")


def _kind(kind: Any) -> str:
    """Return the name of a member of QuantType, or of another library's enum of the same names."""
    return str(getattr(kind, "name", kind))


def _unchanged(x: Tensor, *_rest: Any, **_named: Any) -> Quantised:
    return x, None


def per_token_quant_hip(
    x: Tensor, scale: Tensor | None = None, quant_dtype: torch.dtype | None = None, num_rows: Tensor | None = None, num_rows_factor: int = 1
) -> Quantised:
    """Quantise all rows with one scale a row; AITER's numbers of valid rows are ignored."""
    del num_rows, num_rows_factor
    return tunedgemm.pertoken_quant(x, scale, quant_dtype=quant_dtype or torch.int8)


def per_tensor_quant_hip(
    x: Tensor, scale: Tensor | None = None, quant_dtype: torch.dtype | None = None, num_rows: Tensor | None = None, num_rows_factor: int = 1
) -> Quantised:
    """Quantise with one scale; AITER's numbers of valid rows are ignored."""
    del num_rows, num_rows_factor
    return tunedgemm.per_tensor_quant(x, scale, quant_dtype=quant_dtype or torch.int8)


def per_group_quant_hip(
    x: Tensor,
    scale: Tensor | None = None,
    quant_dtype: torch.dtype | None = None,
    group_size: int = 128,
    transpose_scale: bool = False,
    num_rows: Tensor | None = None,
    num_rows_factor: int = 1,
    scale_type: torch.dtype | None = None,
) -> Quantised:
    """Quantise with one scale for 128 elements of a row, which *transpose_scale* transposes."""
    del num_rows, num_rows_factor
    if scale is not None or group_size != 128 or scale_type not in (None, torch.float32):
        got = f"group_size {group_size}, scale_type {scale_type} and scale {scale}"
        raise OperandError(f"per_1x128: computes one float32 scale for 128 values (got {got}); omit them")
    q, scales = tunedgemm.per_1x128_quant(x, quant_dtype or torch.int8, "m_major" if transpose_scale else "row")
    return q, tunedgemm.transposed_scale(scales) if transpose_scale else scales


def per_1x32_f4_quant(
    x: Tensor,
    scale: Tensor | None = None,
    quant_dtype: torch.dtype | None = None,
    shuffle: bool = False,
    pack_dim: int = -1,
    round_mode: int = 1,
) -> Quantised:
    """Call `tunedgemm.per_1x32_f4_quant`; as in AITER the scales of all rows are one matrix."""
    q, powers = tunedgemm.per_1x32_f4_quant(x, scale, FP4 if quant_dtype is None else quant_dtype, shuffle, pack_dim, round_mode)
    return q, powers if shuffle else powers.reshape(-1, powers.shape[-1])


def per_1x32_f4_quant_hip(
    x: Tensor,
    scale: Tensor | None = None,
    quant_dtype: torch.dtype | None = None,
    shuffle: bool = False,
    num_rows: Tensor | None = None,
    num_rows_factor: int = 1,
) -> Quantised:
    """Quantise to mxfp4; raises OperandError for another dtype, as `tunedgemm.per_1x32_f4_quant` does."""
    del num_rows, num_rows_factor
    return per_1x32_f4_quant(x, scale, quant_dtype, shuffle)


def quant_mxfp4_hip(
    x: Tensor,
    group_size: int = 32,
    round_mode: int = 1,
    e8m0_shuffle: bool = False,
    a16w4_shuffle: bool = False,
    gate_up: bool = False,
    shuffle_weight: bool = False,
) -> Quantised:
    """Quantise [M, K] to mxfp4, and order values and scales as AITER's kernels of experts read them.

    Raises:
        OperandError: group_size is not 32, or the sizes do not fit the orders.
    """
    if group_size != 32:
        raise OperandError(f"quant_mxfp4_hip: one scale is for 32 values (got group_size {group_size})")
    q, scale = tunedgemm.per_1x32_f4_quant(x, shuffle=e8m0_shuffle, round_mode=round_mode)
    if a16w4_shuffle:
        weight = shuffle_weight_a16w4(q[None], 16, gate_up)[0] if shuffle_weight else q
        return weight, shuffle_scale_a16w4(scale, 1, gate_up)
    return tunedgemm.shuffle_weight(q) if shuffle_weight else q, scale


def static_per_tensor_quant(out: Tensor, input: Tensor, scale: Tensor) -> None:
    """Quantise to *out* by the given scale."""
    out.copy_(per_tensor_quant_hip(input, scale, out.dtype)[0])


def dynamic_per_tensor_quant(out: Tensor, input: Tensor, scale: Tensor) -> None:
    """Quantise to *out* and write the one scale."""
    _write(out, scale, per_tensor_quant_hip(input, None, out.dtype))


def dynamic_per_token_scaled_quant(
    out: Tensor,
    input: Tensor,
    scales: Tensor,
    scale_ub: Tensor | None = None,
    shuffle_scale: bool = False,
    num_rows: Tensor | None = None,
    num_rows_factor: int = 1,
) -> None:
    """Quantise to *out* and write one scale a row; *scale_ub* and *shuffle_scale* are refused."""
    if scale_ub is not None or shuffle_scale:
        raise OperandError("dynamic_per_token_scaled_quant: scale_ub and shuffle_scale are not supported; omit them")
    _write(out, scales, per_token_quant_hip(input, None, out.dtype, num_rows, num_rows_factor))


def smoothquant_fwd(out: Tensor, input: Tensor, x_scale: Tensor, y_scale: Tensor) -> None:
    """Quantise ``input * x_scale`` to *out* and write one scale a row to *y_scale*."""
    _write(out, y_scale, tunedgemm.pertoken_quant(input, None, x_scale, quant_dtype=out.dtype))


def static_per_tensor_quant_fp8_i8(qx: Tensor, x_in: Tensor, scale_in: Tensor) -> Tensor:
    """Quantise to *qx* by the given scale, and return it."""
    static_per_tensor_quant(qx, x_in, scale_in)
    return qx


def dynamic_per_tensor_quant_fp8_i8(qx: Tensor, x_in: Tensor, scale_out: Tensor) -> Quantised:
    """Quantise to *qx* and write the one scale; return both."""
    dynamic_per_tensor_quant(qx, x_in, scale_out)
    return qx, scale_out


def dynamic_per_token_quant_fp8_i8(qx: Tensor, x_in: Tensor, scale_out: Tensor) -> Quantised:
    """Quantise to *qx* and write one scale a row; return both."""
    dynamic_per_token_scaled_quant(qx, x_in, scale_out)
    return qx, scale_out


def mxfp4_by_even_scales(x: Tensor, scaling_mode: str = "even", shuffle: bool = False) -> Quantised:
    """Quantise to mxfp4 with scales of amax rounded to one bit; ``dynamic_mxfp4_quant`` of ``fp4_utils``.

    Raises:
        UserError: another scaling_mode, which AITER does not have either.
    """
    if scaling_mode != "even":
        raise UserError(f"dynamic_mxfp4_quant: scaling_mode must be 'even' (got {scaling_mode!r})")
    return tunedgemm.per_1x32_f4_quant(x, shuffle=shuffle, round_mode=_EVEN)


def dynamic_mxfp4_quant(x: Tensor, scaling_mode: str = "even") -> Quantised:
    """Return the bytes of `mxfp4_by_even_scales`; ``dynamic_mxfp4_quant`` of ``ops.triton.quant``."""
    q, scale = mxfp4_by_even_scales(x, scaling_mode)
    return q.view(torch.uint8), scale if scale is None else scale.view(torch.uint8)


def _write(out: Tensor, scale: Tensor, quantised: Any) -> None:
    values, scales = quantised
    out.copy_(values.view(out.shape))
    scale.copy_(scales.view(scale.shape))


def per_1x32_f8_scale_f8_quant(
    x: Tensor,
    scale: Tensor | None = None,
    quant_dtype: torch.dtype | None = None,
    scale_type: torch.dtype | None = None,
    shuffle: bool = False,
) -> Quantised:
    """Quantise to mxfp8; scales in float32 are the same powers of two.

    Raises:
        OperandError: a scale is given.
    """
    if scale is not None:
        raise OperandError("per_1x32_f8_scale_f8_quant: takes its scales from the values; omit the scale")
    q, powers = per_1x32_f8_quant(x, quant_dtype or dtypes.fp8)
    powers = powers.reshape(-1, powers.shape[-1])
    if (scale_type or torch.float32) is not E8M0:
        return q, powers.to(torch.float32)
    return q, tunedgemm.shuffle_scale(powers) if shuffle else powers


_FUNCTIONS: Mapping[str, Callable[..., Quantised]] = {
    "No": _unchanged,
    "per_Tensor": per_tensor_quant_hip,
    "per_Token": per_token_quant_hip,
    "per_1x128": per_group_quant_hip,
    "per_1x32": per_1x32_f4_quant_hip,
}
