"""Routes of a16w16: floats of 16, 32 or 64 bits, or fp8 with per-tensor scales.

Launcher operands: x [..., K], weight [N, K], bias [N] or absent, then scale_a, scale_b and scale_c
of one value or absent.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from tunedgemm.backends.builtin.product import no_fp8, scaled_float32
from tunedgemm.backends.builtin.route import Family, Route
from tunedgemm.device import Device
from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import PluginError
from tunedgemm.shape import Shape

_SPLITS = (2, 4, 8, 16)
_SCALES, _NO_SCALES = "takes fp8 or scaled operands", "takes neither fp8 nor scales"


def _scaled(shape: Shape) -> bool:
    """Return whether operands have scales, or are fp8, whose absent scales are ones as in AITER."""
    return shape.scale != "none" or shape.dtype.startswith("fp8")


def _plain(shape: Shape) -> bool:
    """Return whether input, bias and output have one dtype, without scales."""
    return shape.scale == "none" and shape.outdtype == shape.dtype and shape.bias_dtype in ("", shape.dtype)


def _unfit(shape: Shape, device: Device) -> str:
    del device
    if _scaled(shape):
        return _NO_SCALES
    return "" if _plain(shape) else f"needs bias and output in {shape.dtype} (bias {shape.bias_dtype or 'none'}, output {shape.outdtype})"


def _linear(shape: Shape, device: Device) -> Callable[..., Any]:
    """Compute F.linear by its inner name, as the outer one may be patched to call this package."""
    import torch

    del shape, device
    return torch._C._nn.linear


def _mm(shape: Shape, device: Device) -> Callable[..., Any]:
    import torch

    n, k = shape.n, shape.k

    def mm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        flat = x.reshape(-1, k)
        out = torch.mm(flat, weight.t()) if bias is None else torch.addmm(bias, flat, weight.t())
        return out.view(*x.shape[:-1], n)

    return mm if _plain(shape) else _wider(shape, device)


def _no_mm(shape: Shape, device: Device) -> str:
    del device
    return _NO_SCALES if _scaled(shape) else ""


def _mm_add(shape: Shape, device: Device) -> Callable[..., Any]:
    import torch

    del device
    n, k = shape.n, shape.k

    def mm_add(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.mm(x.reshape(-1, k), weight.t()).add_(bias).view(*x.shape[:-1], n)

    return mm_add


def _no_mm_add(shape: Shape, device: Device) -> str:
    return _unfit(shape, device) or ("" if shape.bias else "needs a bias")


def _bmm(shape: Shape, device: Device) -> Callable[..., Any]:
    import torch

    del device
    n, k = shape.n, shape.k

    def bmm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        flat, batch = x.reshape(1, -1, k), weight.t().unsqueeze(0)
        out = torch.bmm(flat, batch) if bias is None else torch.baddbmm(bias, flat, batch)
        return out.view(*x.shape[:-1], n)

    return bmm


def _mv(shape: Shape, device: Device) -> Callable[..., Any]:
    import torch

    del device
    n, k = shape.n, shape.k

    def mv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        row = x.reshape(k)
        out = torch.mv(weight, row) if bias is None else torch.addmv(bias.view(n), weight, row)
        return out.view(*x.shape[:-1], n)

    return mv


def _no_mv(shape: Shape, device: Device) -> str:
    return _unfit(shape, device) or ("" if shape.m == 1 else f"takes one row, not M={shape.m}")


def _onednn_linear() -> Any:
    """Return oneDNN's linear over plain weights, an operator of some CPU builds of torch; else None."""
    import torch

    return getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None


def _onednn(shape: Shape, device: Device) -> Callable[..., Any]:
    import torch

    del device
    linear, n, k = _onednn_linear(), shape.n, shape.k
    runs = {"bf16": torch.ops.mkldnn._is_mkldnn_bf16_supported, "fp16": torch.ops.mkldnn._is_mkldnn_fp16_supported}
    if shape.dtype in runs and not runs[shape.dtype]():
        raise PluginError(f"oneDNN has no {shape.dtype} linear on this processor")

    def onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out: torch.Tensor = linear(x.reshape(-1, k), weight, None if bias is None else bias.view(n), "none", [], "")
        return out.view(*x.shape[:-1], n)

    return onednn


def _no_onednn(shape: Shape, device: Device) -> str:
    if device.kind != "cpu" or shape.dtype not in ("bf16", "fp16", "fp32"):
        return f"multiplies floats of 16 or 32 bits on a CPU, not {shape.dtype} on {device.gfx}"
    return _unfit(shape, device) or ("" if _onednn_linear() is not None else "needs a build of torch with oneDNN's linear")


def _splitk_bmm(shape: Shape, device: Device, split: int) -> Callable[..., Any]:
    """Split K in *split* parts: one batched GEMM into float32 partials, then their sum."""
    import torch

    del device
    n, k, out_dtype = shape.n, shape.k, torch_dtype(shape.outdtype)
    if split < 2 or k % split:
        raise PluginError(f"splitk_bmm needs K divisible by its split (K={k}, splitK={split})")

    def splitk_bmm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        parts = x.reshape(-1, split, k // split).transpose(0, 1)
        weights = weight.view(n, split, k // split).permute(1, 2, 0)
        out = torch.bmm(parts, weights, out_dtype=torch.float32).sum(0)
        out = out if bias is None else out + bias
        return out.to(out_dtype).view(*x.shape[:-1], n)

    return splitk_bmm


def _no_splitk(shape: Shape, device: Device) -> str:
    if device.kind == "cpu" or shape.dtype not in ("bf16", "fp16"):
        return f"multiplies bf16 or fp16 on a GPU, not {shape.dtype} on {device.gfx}"
    return _unfit(shape, device)


def _splits(shape: Shape, device: Device) -> tuple[int, ...]:
    """Return the splits of K worth trying, with at least 512 per part.

    There are none for outputs large enough to fill the device.
    """
    del device
    if shape.m * shape.n > 1 << 21:
        return ()
    return tuple(split for split in _SPLITS if shape.k % (split * 64) == 0 and shape.k // split >= 512)


def _wider(shape: Shape, device: Device) -> Callable[..., Any]:
    """Compute another output dtype than the input's, without rounding in between."""
    import torch

    n, k, out_dtype = shape.n, shape.k, torch_dtype(shape.outdtype)
    fused = device.kind != "cpu" and out_dtype is torch.float32 and shape.dtype in ("bf16", "fp16")

    def wider(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        flat = x.reshape(-1, k)
        if fused:
            out = torch.mm(flat, weight.t(), out_dtype=torch.float32)
        else:
            exact = torch.promote_types(torch.float32, x.dtype)
            out = torch.mm(flat.to(exact), weight.to(exact).t())
        out = out if bias is None else out + bias
        return out.to(out_dtype).view(*x.shape[:-1], n)

    return wider


def _scaled_mm(shape: Shape, device: Device) -> Callable[..., Any]:
    """Compute `torch._scaled_mm` with the scales, then bias and scale_c."""
    import torch

    k, out_dtype, product = shape.k, torch_dtype(shape.outdtype), scaled_float32(shape.m, shape.n, device)

    def scaled_mm(x: Any, weight: Any, bias: Any = None, scale_a: Any = None, scale_b: Any = None, scale_c: Any = None) -> Any:
        unit_scale = torch.ones((), dtype=torch.float32, device=x.device)
        left, right = (unit_scale if scale is None else scale.float().reshape(()) for scale in (scale_a, scale_b))
        flat = x.reshape(-1, k)
        if out_dtype is torch.bfloat16:
            out = torch._scaled_mm(flat, weight.t(), left, right, out_dtype=torch.bfloat16)
        else:
            out = product(flat, weight, left, right)
        return _finish(out, bias, scale_c, out_dtype, x)

    return scaled_mm


def _no_scaled_mm(shape: Shape, device: Device) -> str:
    if not _scaled(shape):
        return _SCALES
    return "is slower than a product of float32 on a CPU" if device.kind == "cpu" else no_fp8(shape, device)


def _float32(shape: Shape, device: Device) -> Callable[..., Any]:
    """Multiply in float32, then scale."""
    import torch

    del device
    k, out_dtype = shape.k, torch_dtype(shape.outdtype)

    def float32(x: Any, weight: Any, bias: Any = None, scale_a: Any = None, scale_b: Any = None, scale_c: Any = None) -> Any:
        out = torch.mm(x.reshape(-1, k).float(), weight.float().t())
        for scale in (scale_a, scale_b):
            out = out if scale is None else out * scale
        return _finish(out, bias, scale_c, out_dtype, x)

    return float32


def _no_float32(shape: Shape, device: Device) -> str:
    del device
    return "" if _scaled(shape) else _SCALES


def _finish(out: Any, bias: Any, scale_c: Any, out_dtype: Any, x: Any) -> Any:
    out = out if bias is None else out + bias
    out = out if scale_c is None else out * scale_c
    return out.to(out_dtype).view(*x.shape[:-1], out.shape[-1])


def _native(shape: Shape, device: Device) -> str:
    if _scaled(shape):
        return family.first(shape, device, "scaled_mm", "float32")
    return "linear" if _plain(shape) else "mm"


family = Family(
    MappingProxyType(
        {
            "linear": Route(_linear, _unfit),
            "mm": Route(_mm, _no_mm),
            "bmm": Route(_bmm, _unfit),
            "mm_add": Route(_mm_add, _no_mm_add),
            "mv": Route(_mv, _no_mv),
            "onednn": Route(_onednn, _no_onednn),
            "splitk_bmm": Route(_splitk_bmm, _no_splitk, _splits, splits=True),
            "scaled_mm": Route(_scaled_mm, _no_scaled_mm),
            "float32": Route(_float32, _no_float32),
        }
    ),
    _native,
)
