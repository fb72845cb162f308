"""Methods of fp8 layers, which quantise x and run one of the products."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.quantization.fp8_utils import fp8_scaled_mm, w8a8_block_fp8_matmul_deepgemm, w8a8_block_fp8_matmul_triton

_LARGEST = 448.0


class ChannelMethod:
    """Scales of channels, and of tokens or one that is static; the layer's weight is a view [K, N].

    SGLang repeats a static one for each row unless its kernel broadcasts it (`native`, 0.5.23).
    """

    def __init__(self, native: bool = True) -> None:
        self.native = native

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply x [..., K]."""
        rows = x.reshape(-1, x.shape[-1])
        scale = getattr(layer, "input_scale", None)
        if scale is None:
            scale = rows.float().abs().amax(1, keepdim=True) / _LARGEST
        elif not self.native:
            scale = scale.repeat(len(rows)).view(-1, 1)
        q = (rows.float() / scale).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
        out = fp8_scaled_mm(q, layer.weight, scale, layer.weight_scale, out_dtype=x.dtype, bias=bias)
        return out.view(*x.shape[:-1], -1)


class BlockMethod:
    """Scales of blocks, by DeepGEMM or Triton; the bias is added afterwards."""

    def __init__(self, deepgemm: bool) -> None:
        self.deepgemm = deepgemm

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply x [..., K]."""
        rows = x.reshape(-1, x.shape[-1]).float()
        groups = rows.view(len(rows), -1, 128)
        scale = groups.abs().amax(2) / _LARGEST
        q = (groups / scale[:, :, None]).to(torch.float8_e4m3fn).view(len(rows), -1)
        if self.deepgemm:
            columns = torch.zeros(scale.shape[1], -(-len(rows) // 4) * 4)
            columns[:, : len(rows)] = scale.t()
            out = w8a8_block_fp8_matmul_deepgemm(q, layer.weight, columns.t()[: len(rows)], layer.weight_scale_inv, [128, 128], x.dtype)
        else:
            out = w8a8_block_fp8_matmul_triton(q, layer.weight, scale, layer.weight_scale_inv, [128, 128], output_dtype=x.dtype)
        return (out if bias is None else out + bias).view(*x.shape[:-1], -1)
