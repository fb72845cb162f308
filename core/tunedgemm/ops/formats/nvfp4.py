"""nvfp4 quantisation: e2m1 values, an e4m3 scale per 16 elements of K, one float32 global scale.

The global scale is the one to multiply by (decode convention): value = e2m1 * scale * global scale.
Quantisers of vLLM and FlashInfer take its reciprocal, 2688 / amax.
"""

from __future__ import annotations

import torch

from tunedgemm.errors import OperandError
from tunedgemm.ops.formats.mxfp4 import as_fp4, e2m1_codes
from tunedgemm.ops.formats.quant import as_rows, slices
from tunedgemm.ops.formats.weight_only import global_scale_of, scales_of

_GROUP, _E4M3 = 16, torch.float8_e4m3fn
#: Largest value of e2m1.
_LARGEST = 6.0


def per_1x16_f4_quant(x: torch.Tensor, global_scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise to nvfp4 in two levels, values and scales to nearest, ties to even.

    A tensor with NaN or infinity dequantises to NaN. With a given global scale only the groups with
    NaN or infinity do. A group whose scale rounds to 0 dequantises to 0.

    Args:
        x: [..., K] of a float dtype of 16 bits or more; K a multiple of 16.
        global_scale: one float32 value; by default amax / 2688. Where it is smaller than that,
            values saturate; 1 is the one-level format.

    Returns:
        (q [..., K/2] torch.float4_e2m1fn_x2, the even element in the low nibble;
        scale [..., K/16] torch.float8_e4m3fn; global scale, a float32 scalar)

    Raises:
        OperandError: x is not supported, or the global scale is not one value.
    """
    rows, k = as_rows(x), x.shape[-1]
    if k % _GROUP:
        raise OperandError(f"nvfp4 has a scale for each {_GROUP} elements: K must be a multiple of {_GROUP} (got K={k}); pad with zeros")
    if global_scale is None:
        tops = [rows[part].abs().amax() for part in slices(*rows.shape)]
        factor = global_scale_of(torch.stack(tops) if tops else rows, _LARGEST, _E4M3)
    elif global_scale.numel() != 1 or global_scale.dtype != torch.float32:
        raise OperandError(f"per_1x16_f4_quant: global_scale must be one float32 (got {tuple(global_scale.shape)} {global_scale.dtype})")
    else:
        factor = global_scale.detach().reshape(())
    q = torch.empty(rows.shape[0], k // 2, dtype=torch.uint8, device=x.device)
    scale = torch.empty(rows.shape[0], k // _GROUP, dtype=_E4M3, device=x.device)
    for part in slices(*rows.shape):
        values = rows[part].to(torch.float32).view(-1, k // _GROUP, _GROUP)
        scale[part] = scales_of(values.abs().amax(-1), factor, _LARGEST, _E4M3)
        divisor = scale[part].to(torch.float32) * factor
        codes = e2m1_codes(torch.nan_to_num(values / divisor[..., None])).view(-1, k // 2, 2)
        q[part] = codes[..., 0] | (codes[..., 1] << 4)
    return as_fp4(q.view(*x.shape[:-1], k // 2)), scale.view(*x.shape[:-1], k // _GROUP), factor
