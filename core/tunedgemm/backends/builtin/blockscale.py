"""Routes of a8w8_blockscale and a8w8_blockscale_bpreshuffle: fp8 with block scales.

Activations have 1x128 scales, weights 128x128.

Launcher operands: x [..., K], weight [N, K], x_scale [..., ceil(K/128)], w_scale [ceil(N/128),
ceil(K/128)]. x_scale has any order (`tunedgemm.ops.scale_order`), which its strides show. The
memory of the bpreshuffle op's x_scale holds the transpose.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tunedgemm.backends.builtin.product import cublas_scales, finish, is_differentiated, no_fp8, products
from tunedgemm.backends.builtin.route import Family, Route
from tunedgemm.device import Device
from tunedgemm.dtype import torch_dtype
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch

BLOCK = 128
#: Most bytes of float32 partial products for all K blocks at once.
PARTIALS = 1 << 28
#: Largest M for which the partial products are smaller than a dequantised weight.
_FEW_ROWS = 32
#: Divisor of K for which rows of w_scale are multiples of four, which every torch reads correctly.
_FOURS = 512
#: `torch._scaled_mm_v2`'s codes for scales of 1x128 and of 128x128.
_ONE_128, _128_128 = 4, 5


def _by_row(shape: Shape) -> Callable[[Any], Any]:
    """Return a function that views x_scale as [M, blocks of K], whatever the order of its memory."""
    rows, blocks = shape.m, -(-shape.k // BLOCK)
    if shape.op.endswith("_bpreshuffle"):
        return lambda scale: scale.reshape(blocks, rows).t()
    return lambda scale: scale.reshape(rows, blocks)


def times_blocks(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Multiply fp8 or int8 values [R, K] by scales [R, ceil(K/128)] in float32, and round once."""
    import torch

    values = q.to(torch.bfloat16)
    if is_differentiated(scale) or is_differentiated(values):  # no derivative goes through an output that was given
        return (values * scale.repeat_interleave(BLOCK, -1)[:, : q.shape[-1]]).to(dtype)
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
    """Expand w_scale [..., ceil(N/128), blocks] to one row per row of the weight, [..., N, blocks]."""
    return scale.repeat_interleave(BLOCK, -2)[..., :n, :]


def _scaled_mm(shape: Shape, device: Device) -> Callable[..., Any]:
    """Compute cuBLASLt's product with both scales, with rows padded to the multiple of four it needs."""
    del device
    m, n, k, by_row = shape.m, shape.n, shape.k, _by_row(shape)
    more, product = -m % 4, scaled_blocks(k, torch_dtype(shape.outdtype))

    def scaled_mm(x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
        flat, scale = padded_rows(x.reshape(-1, k), by_row(x_scale), more)
        return product(flat, weight, scale, w_scale)[:m].view(*x.shape[:-1], n)

    return scaled_mm


def padded_rows(x: torch.Tensor, scale: torch.Tensor, more: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Append *more* rows to fp8 x [M, K], of zeros, and to its scales [M, blocks], with M innermost.

    M-major scales are not copied where no row is missing, nor where their own padding may be read.
    """
    import torch

    if more == 0:
        return x, scale.t().contiguous().t()
    pad, (m, blocks) = torch.nn.functional.pad, scale.shape
    rows = pad(x.view(torch.uint8), (0, 0, 0, more)).view(x.dtype)
    whole = m + more
    if scale.stride(1) == whole and (m == 1 or scale.stride(0) == 1):
        held = scale.untyped_storage().nbytes() // scale.element_size() - scale.storage_offset()
        if held >= whole * blocks:
            return rows, scale.as_strided((whole, blocks), (1, whole))
    return rows, pad(scale.t(), (0, more)).t()


def scaled_blocks(k: int, out_dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """Return cuBLASLt's product of x [M, K] and weight [N, K] with scales of blocks.

    The scales are [M, blocks], M innermost, and [ceil(N/128), blocks]. cuBLASLt expects the rows of
    the weight's scales to be a multiple of four long (cuBLAS manual, scaling factors of 128x128
    blocks). `torch._scaled_mm` of torch 2.11 ignores that and reads the wrong ones. The newer
    operator takes padded rows; on an H200 its results were right for each K divisible by 16 that
    was tried.
    """
    import torch

    missing = (-k // BLOCK) % 4

    def compact(x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(x, weight.t(), x_scale, w_scale.contiguous().t(), out_dtype=out_dtype)

    def padded(x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
        by_block = torch.nn.functional.pad(w_scale, (0, missing)).t()
        return torch._scaled_mm_v2(x, weight.t(), [x_scale], [_ONE_128], [], [by_block], [_128_128], [], None, out_dtype)

    return padded if missing else compact


def _no_scaled_mm(shape: Shape, device: Device) -> str:
    if not cublas_scales(device):
        return f"has no block scales on {device.gfx}, or not with a CUDA before 12.9"
    if reason := no_fp8(shape, device):
        return reason
    if shape.k % _FOURS == 0 or _takes_padded_scales():
        return ""
    return f"needs K divisible by {_FOURS} with this version of torch (K={shape.k})"


def _takes_padded_scales() -> bool:
    import torch

    return hasattr(torch, "_scaled_mm_v2")


def _blocks(shape: Shape, device: Device) -> Callable[..., Any]:
    """Compute one product per block of K, scaled and accumulated in float32."""
    import torch

    n, k, out_dtype, by_row, product = shape.n, shape.k, torch_dtype(shape.outdtype), _by_row(shape), products(device)

    def blocks(x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
        flat, by_x, by_w = x.reshape(-1, k).to(torch.bfloat16), by_row(x_scale), spread(w_scale, n)
        out = torch.zeros(flat.shape[0], n, dtype=torch.float32, device=x.device)
        for block, start in enumerate(range(0, k, BLOCK)):
            part = product(flat[:, start : start + BLOCK], weight[:, start : start + BLOCK])
            out.addcmul_(part.mul_(by_x[:, block, None]), by_w[:, block])
        return finish(out, None, out_dtype, (*x.shape[:-1], n))

    return blocks


def _blocks_bmm(shape: Shape, device: Device) -> Callable[..., Any]:
    """Compute the products of all blocks of K at once, then their scaled sum in float32."""
    n, k, out_dtype, by_row, product = shape.n, shape.k, torch_dtype(shape.outdtype), _by_row(shape), products(device)

    def blocks_bmm(x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
        left, right = (part.reshape(-1, k // BLOCK, BLOCK).transpose(0, 1) for part in (x, weight))
        parts = product(left, right)
        parts.mul_(by_row(x_scale).t().unsqueeze(2)).mul_(spread(w_scale, n).t().unsqueeze(1))
        return finish(parts.sum(0), None, out_dtype, (*x.shape[:-1], n))

    return blocks_bmm


def _no_blocks_bmm(shape: Shape, device: Device) -> str:
    del device
    if shape.k % BLOCK:
        return f"needs K divisible by {BLOCK} (K={shape.k})"
    size = shape.m * shape.n * (shape.k // BLOCK) * 4
    return f"would hold {size >> 20} MiB of partial products, more than {PARTIALS >> 20}" if size > PARTIALS else ""


def _dequantised(dtype: str) -> Callable[[Shape, Device], Callable[..., Any]]:
    def make(shape: Shape, device: Device) -> Callable[..., Any]:
        import torch

        n, k, out_dtype, by_row, inner = shape.n, shape.k, torch_dtype(shape.outdtype), _by_row(shape), torch_dtype(dtype)
        product = products(device, narrow=False)
        plain = inner == out_dtype

        def dequantised(x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
            left = times_blocks(x.reshape(-1, k), by_row(x_scale), inner)
            right = times_blocks(weight, spread(w_scale, n), inner)
            out = torch._C._nn.linear(left, right) if plain else product(left, right)
            return finish(out, None, out_dtype, (*x.shape[:-1], n))

        return dequantised

    return make


def _no_bf16(shape: Shape, device: Device) -> str:
    """Return why bf16 operands are too coarse, or "".

    Rounding both adds an error of about 2^-9 of a row, as does a bf16 output.
    """
    del device
    return "" if shape.outdtype == "bf16" else f"rounds its operands to bf16, too coarse for {shape.outdtype}"


def _no_float32(shape: Shape, device: Device) -> str:
    """Return why float32 products are too coarse, or "".

    Dequantised values are rounded to 11 bits where the process lets float32 products use TF32.
    """
    coarse = device.kind != "cpu" and shape.outdtype == "fp32"
    return "may be computed in TF32, too coarse for fp32" if coarse else ""


def _native(shape: Shape, device: Device) -> str:
    if device.kind == "cpu":
        return "float32"
    wide = ("bf16", "blocks_bmm", "float32", "blocks")
    return family.first(shape, device, "scaled_mm", *(("blocks_bmm",) if shape.m <= _FEW_ROWS else ()), *wide)


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
