"""Routes of a8w8_blockscale and a8w8_blockscale_bpreshuffle: fp8, one scale for 1x128 activations and 128x128 weights.

Launcher operands: x [..., K], weight [N, K], x_scale [..., ceil(K/128)], w_scale [ceil(N/128), ceil(K/128)]. The memory of the
bpreshuffle op's x_scale holds the transpose.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tunedgemm.device import Device
from tunedgemm.dtype import torch_dtype
from tunedgemm.shape import Shape
from tunedgemm.torch_backend.product import capability, finished, no_fp8, products
from tunedgemm.torch_backend.route import Family, Route

if TYPE_CHECKING:
    import torch

BLOCK = 128
#: Bytes of float32 partial products of all blocks of K at once, at most.
PARTIALS = 1 << 28


def _by_row(shape: Shape) -> Callable[[Any], Any]:
    """x_scale as given to [M, blocks of K], a view in either order of its memory."""
    rows, blocks = shape.m, -(-shape.k // BLOCK)
    if shape.op.endswith("_bpreshuffle"):
        return lambda scale: scale.reshape(blocks, rows).t()
    return lambda scale: scale.reshape(rows, blocks)


def times_blocks(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp8 or int8 values [R, K] times their scales [R, ceil(K/128)], multiplied in float32 and rounded once."""
    import torch

    values = q.to(torch.bfloat16)
    out = torch.empty(values.shape, dtype=dtype, device=q.device)
    whole = q.shape[-1] // BLOCK
    edge = whole * BLOCK
    if whole:
        parts = (part[:, :edge].unflatten(1, (whole, BLOCK)) for part in (values, out))
        torch.mul(next(parts), scale[:, :whole, None], out=next(parts))
    if edge < q.shape[-1]:
        torch.mul(values[:, edge:], scale[:, whole:], out=out[:, edge:])
    return out


def spread(scale: torch.Tensor, n: int) -> torch.Tensor:
    """w_scale [..., ceil(N/128), blocks] to one row for each row of the weight, [..., N, blocks]."""
    return scale.repeat_interleave(BLOCK, -2)[..., :n, :]


def _scaled_mm(shape: Shape, device: Device, split: int) -> Callable[..., Any]:
    import torch

    del device, split
    n, k, out_dtype, by_row = shape.n, shape.k, torch_dtype(shape.outdtype), _by_row(shape)

    def scaled_mm(x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
        scale = by_row(x_scale).t().contiguous().t()  # cuBLASLt reads it with M innermost
        out = torch._scaled_mm(x.reshape(-1, k), weight.t(), scale, w_scale.t(), out_dtype=out_dtype)
        return out.view(*x.shape[:-1], n)

    return scaled_mm


def _no_scaled_mm(shape: Shape, device: Device) -> str:
    """cuBLASLt's limits of 1x128 by 128x128 scaling; its 128x128 scales have rows of a multiple of four."""
    if capability(device) != 90:
        return f"has no block scales on {device.gfx}"
    if reason := no_fp8(shape, device):
        return reason
    if shape.n % BLOCK or shape.k % (4 * BLOCK) or shape.m < 2:
        return f"needs two rows, N divisible by {BLOCK} and K by {4 * BLOCK} (M={shape.m}, N={shape.n}, K={shape.k})"
    return "" if shape.outdtype == "bf16" else f"with block scales gives bf16, not {shape.outdtype}"


def _blocks(shape: Shape, device: Device, split: int) -> Callable[..., Any]:
    """One product for each block of K, scaled and added up in float32."""
    import torch

    del split
    n, k, out_dtype, by_row, product = shape.n, shape.k, torch_dtype(shape.outdtype), _by_row(shape), products(device)

    def blocks(x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
        flat, by_x, by_w = x.reshape(-1, k).to(torch.bfloat16), by_row(x_scale), spread(w_scale, n)
        out = torch.zeros(flat.shape[0], n, dtype=torch.float32, device=x.device)
        for block, start in enumerate(range(0, k, BLOCK)):
            part = product(flat[:, start : start + BLOCK], weight[:, start : start + BLOCK])
            out.addcmul_(part.mul_(by_x[:, block, None]), by_w[:, block])
        return finished(out, None, out_dtype, (*x.shape[:-1], n))

    return blocks


def _blocks_bmm(shape: Shape, device: Device, split: int) -> Callable[..., Any]:
    """The products of all blocks of K at once, then their scaled sum in float32."""

    del split
    n, k, out_dtype, by_row, product = shape.n, shape.k, torch_dtype(shape.outdtype), _by_row(shape), products(device)

    def blocks_bmm(x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
        left, right = (part.reshape(-1, k // BLOCK, BLOCK).transpose(0, 1) for part in (x, weight))
        parts = product(left, right)
        parts.mul_(by_row(x_scale).t().unsqueeze(2)).mul_(spread(w_scale, n).t().unsqueeze(1))
        return finished(parts.sum(0), None, out_dtype, (*x.shape[:-1], n))

    return blocks_bmm


def _no_blocks_bmm(shape: Shape, device: Device) -> str:
    del device
    if shape.k % BLOCK:
        return f"needs K divisible by {BLOCK} (K={shape.k})"
    size = shape.m * shape.n * (shape.k // BLOCK) * 4
    return f"would hold {size >> 20} MiB of partial products, more than {PARTIALS >> 20}" if size > PARTIALS else ""


def _dequantised(dtype: str) -> Callable[[Shape, Device, int], Callable[..., Any]]:
    def make(shape: Shape, device: Device, split: int) -> Callable[..., Any]:
        import torch

        del split
        n, k, out_dtype, by_row, inner = shape.n, shape.k, torch_dtype(shape.outdtype), _by_row(shape), torch_dtype(dtype)
        product = products(device, narrow=False)
        plain = inner == out_dtype

        def dequantised(x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
            left = times_blocks(x.reshape(-1, k), by_row(x_scale), inner)
            right = times_blocks(weight, spread(w_scale, n), inner)
            out = torch._C._nn.linear(left, right) if plain else product(left, right)
            return finished(out, None, out_dtype, (*x.shape[:-1], n))

        return dequantised

    return make


def _no_bf16(shape: Shape, device: Device) -> str:
    """Both operands are rounded to bf16: an error of about 2^-9 of a row, as that of a bf16 output."""
    del device
    return "" if shape.outdtype == "bf16" else f"rounds its operands to bf16, too coarse for {shape.outdtype}"


def _no_float32(shape: Shape, device: Device) -> str:
    """Dequantised values are rounded to 11 bits where the process lets products of float32 use TF32."""
    coarse = device.kind != "cpu" and shape.outdtype == "fp32"
    return "may be computed in TF32, too coarse for fp32" if coarse else ""


def _native(shape: Shape, device: Device) -> str:
    if device.kind == "cpu":
        return "float32"
    return family.first(shape, device, "scaled_mm", "bf16", "float32", "blocks_bmm", "blocks")


family = Family(
    MappingProxyType(
        {
            "scaled_mm": Route(_scaled_mm, _no_scaled_mm),
            "bf16": Route(_dequantised("bf16"), _no_bf16),
            "blocks_bmm": Route(_blocks_bmm, _no_blocks_bmm),
            "blocks": Route(_blocks),
            "float32": Route(_dequantised("fp32"), _no_float32),
        }
    ),
    _native,
)
