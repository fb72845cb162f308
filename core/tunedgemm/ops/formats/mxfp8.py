"""mxfp8 quantisation and dequantisation: fp8 values with one e8m0 scale per 32 elements of K.

Rounding and non-finite groups are treated as in `tunedgemm.ops.formats.mxfp4`. Three rules for the
scale are in use. They differ in the bytes of scales and values, so compare dequantised values.
"""

from __future__ import annotations

import torch

from tunedgemm.errors import OperandError
from tunedgemm.ops.formats.mxfp4 import power_of
from tunedgemm.ops.formats.quant import as_rows, dequant_blocks, slices
from tunedgemm.ops.formats.scales import E8M0, as_bytes

_MX = 32
_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
#: Rules by name, with what each subtracts from floor(log2(amax)); None for a scale rounded up.
_RULES = {"rceil": None, "floor": 8, "vllm": 0}


def per_1x32_f8_quant(
    x: torch.Tensor, quant_dtype: torch.dtype = torch.float8_e4m3fn, rule: str = "rceil"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to mxfp8; by default the scale is amax / largest value, rounded up to a power of two.

    Args:
        x: [..., K] of a float dtype of 16 bits or more; K a multiple of 32.
        quant_dtype: torch.float8_e4m3fn or torch.float8_e4m3fnuz.
        rule: ``rceil``, the default (NVIDIA, torchao's RCEIL); ``floor``, the exponent of amax
            minus 8, where values above 448 saturate (OCP, torchao's FLOOR); or ``vllm``, the
            exponent of amax, which leaves the top 8 exponents unused (vLLM's torch fallback).

    Returns:
        (q [..., K] of quant_dtype, scale [..., K/32] torch.float8_e8m0fnu)

    Raises:
        OperandError: x, quant_dtype or rule is not supported.
    """
    if rule not in _RULES:
        raise OperandError(f"per_1x32_f8_quant: rule must be {' or '.join(_RULES)} (got {rule!r})")
    rows, k = as_rows(x), x.shape[-1]
    if quant_dtype not in _FP8 or k % _MX:
        raise OperandError(f"mxfp8 is {' or '.join(map(str, _FP8))} with K a multiple of {_MX} (got {quant_dtype}, K={k})")
    limit = torch.finfo(quant_dtype).max
    q = torch.empty(rows.shape, dtype=quant_dtype, device=x.device)
    scale = torch.empty(rows.shape[0], k // _MX, dtype=torch.uint8, device=x.device)
    for part in slices(*rows.shape):
        values = rows[part].to(torch.float32).view(-1, k // _MX, _MX)
        power = _power(values.abs().amax(-1), limit, _RULES[rule])
        scale[part] = power.to(torch.uint8)
        inverse = (254 - power).mul_(1 << 23).clamp_(min=1 << 22).view(torch.float32)  # the last is 2^-127
        scaled = (values * inverse[..., None]).masked_fill_((power == 255)[..., None], 0.0)
        q[part] = scaled.clamp_(-limit, limit).to(quant_dtype).view(-1, k)
    return q.view(x.shape), scale.view(*x.shape[:-1], k // _MX).view(E8M0)


def _power(top: torch.Tensor, limit: float, less: int | None) -> torch.Tensor:
    """Return the e8m0 byte of an amax: rounded up over *limit*, or its exponent minus *less*."""
    if less is None:
        return power_of(top, limit)
    field = (top.contiguous().view(torch.int32) & 0x7FFFFFFF) >> 23
    return torch.where(field == 255, 255, (field - less).clamp_(min=0))


def dequant_1x32(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Compute q * scale per 32 elements in float32 (or float64), rounded once to *dtype*.

    Args:
        q: [..., K], torch.int8 or a torch.float8.
        scale: [..., K/32]: a float dtype, or e8m0 as torch.float8_e8m0fnu or torch.uint8.

    Raises:
        OperandError: scale has another shape, or q another dtype.
    """
    if scale.dtype in (E8M0, torch.uint8):
        scale = as_bytes(scale, E8M0, "e8m0 scales").view(E8M0).to(torch.float32)
    return dequant_blocks(q, scale, dtype, (1, _MX))
