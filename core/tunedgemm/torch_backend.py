"""The built-in backend ``torch``: every call-local route that torch has, for every shape, behind the same hooks.

It ranks last and never refuses, so it is what every other answer falls back to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tunedgemm.device import Device, device_of
from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import PluginError
from tunedgemm.hookspecs import hookimpl
from tunedgemm.launcher import Launcher
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported

OPS = ("a16w16",)
LIBTYPE = "torch"
_SPLITS = (2, 4, 8, 16)


def library_version(device: Device) -> str:
    """The torch version: its routes call vendor libraries that change with it."""
    return dict(device.versions).get("torch", "")


@hookimpl
def supports() -> bool:
    """Every shape of every device."""
    return True


@hookimpl
def enumerate_solutions(shape: Shape, device: Device) -> Iterator[Solution]:
    """``native`` (F.linear) first, then the other routes to the same product."""
    yield _solution("native")
    if shape.scale != "none" or shape.layout != "row" or shape.m == 0:
        return
    yield _solution("mm")
    if shape.outdtype != shape.dtype or shape.bias_dtype not in ("", shape.dtype):
        return
    yield _solution("bmm")
    if shape.bias:
        yield _solution("mm_add")
    if shape.m == 1:
        yield _solution("mv")
    if device.kind == "cpu" and _onednn_linear() is not None and shape.dtype in ("bf16", "fp16", "fp32"):
        yield _solution("onednn")
    if device.kind != "cpu" and shape.dtype in ("bf16", "fp16"):
        for split in _SPLITS:
            if shape.k % (split * 64) == 0 and shape.k // split >= 512 and shape.m * shape.n <= 1 << 21:
                yield _solution("splitk_bmm", split)


@hookimpl
def heuristic_fallback() -> Solution:
    """F.linear: the answer when nobody knows better."""
    return _solution("native")


@hookimpl
def run(solution: Solution, operands: tuple[Any, ...]) -> Any:
    """Launch one route; the output has the dtype of x."""
    x = operands[0]
    shape = op_named(OPS[0]).shape_of(*operands)
    return _call(solution, shape, device_of(x.get_device()))(*operands)


@hookimpl
def bind(solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
    """The route as a launcher; refuses a name that this version does not have."""
    if shape.layout != "row":
        return Unsupported(f"torch reads plain [N, K] weights, not layout {shape.layout!r}")
    try:
        return Launcher(_call(solution, shape, device), graph_safe=True)
    except PluginError as error:
        return Unsupported(str(error))


def _solution(name: str, split: int = 0) -> Solution:
    return Solution(LIBTYPE, name, split, batch_invariant=False)


def _call(solution: Solution, shape: Shape, device: Device) -> Callable[..., Any]:
    """The function of one route for one shape."""
    import torch

    name, out = solution.kernel_name, torch_dtype(shape.outdtype)
    if shape.scale != "none":
        return _scaled(shape, device)
    plain = shape.outdtype == shape.dtype and shape.bias_dtype in ("", shape.dtype)
    # AITER's rows name no route where it is F.linear.
    if name in ("native", ""):
        # F.linear under its inner name: the outer one may be patched to come here.
        return torch._C._nn.linear if plain else _wider(shape, device, out)
    if name == "mm":
        return _mm(shape) if plain else _wider(shape, device, out)
    routes: dict[str, Callable[[Shape], Callable[..., Any]]] = {"bmm": _bmm, "mm_add": _mm_add, "mv": _mv, "onednn": _onednn}
    if name in routes:
        return routes[name](shape)
    if name == "splitk_bmm":
        return _splitk_bmm(shape, solution.split_k)
    raise PluginError(f"torch has no route {name!r}; it has native, mm, splitk_bmm, {', '.join(routes)}")


def _mm(shape: Shape) -> Callable[..., Any]:
    import torch

    n, k = shape.n, shape.k

    def mm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        flat = x.reshape(-1, k)
        out = torch.mm(flat, weight.t()) if bias is None else torch.addmm(bias, flat, weight.t())
        return out.view(*x.shape[:-1], n)

    return mm


def _mm_add(shape: Shape) -> Callable[..., Any]:
    import torch

    n, k = shape.n, shape.k

    def mm_add(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.mm(x.reshape(-1, k), weight.t()).add_(bias).view(*x.shape[:-1], n)

    return mm_add


def _bmm(shape: Shape) -> Callable[..., Any]:
    import torch

    n, k = shape.n, shape.k

    def bmm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        flat, batch = x.reshape(1, -1, k), weight.t().unsqueeze(0)
        out = torch.bmm(flat, batch) if bias is None else torch.baddbmm(bias, flat, batch)
        return out.view(*x.shape[:-1], n)

    return bmm


def _mv(shape: Shape) -> Callable[..., Any]:
    import torch

    n, k = shape.n, shape.k

    def mv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        row = x.reshape(k)
        out = torch.mv(weight, row) if bias is None else torch.addmv(bias.view(n), weight, row)
        return out.view(*x.shape[:-1], n)

    if shape.m != 1:
        raise PluginError(f"mv takes one row, not M={shape.m}")
    return mv


def _onednn_linear() -> Any:
    """oneDNN's linear over plain weights, an operator of torch's CPU builds with it; else None."""
    import torch

    return getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None


def _onednn(shape: Shape) -> Callable[..., Any]:
    import torch

    linear, k = _onednn_linear(), shape.k
    if linear is None:
        raise PluginError("this build of torch has no oneDNN linear")
    runs = {"bf16": torch.ops.mkldnn._is_mkldnn_bf16_supported, "fp16": torch.ops.mkldnn._is_mkldnn_fp16_supported}
    if shape.dtype in runs and not runs[shape.dtype]():
        raise PluginError(f"oneDNN has no {shape.dtype} linear on this processor")
    n = shape.n

    def onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out: torch.Tensor = linear(x.reshape(-1, k), weight, bias, "none", [], "")
        return out.view(*x.shape[:-1], n)

    return onednn


def _splitk_bmm(shape: Shape, split: int) -> Callable[..., Any]:
    """K cut into *split* parts, one batched product into float32 partials, then their sum."""
    import torch

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


def _wider(shape: Shape, device: Device, out_dtype: Any) -> Callable[..., Any]:
    """Another output dtype than the input's: never rounded through the narrow one on the way to a wider."""
    import torch

    n, k = shape.n, shape.k
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


def _scaled(shape: Shape, device: Device) -> Callable[..., Any]:
    """Operands with per-tensor scales: `torch._scaled_mm` where it takes them, else dequantise and multiply."""
    import torch

    n, k, out_dtype = shape.n, shape.k, torch_dtype(shape.outdtype)
    fp8 = shape.dtype.startswith("fp8") and device.kind != "cpu" and n % 16 == 0 and k % 16 == 0

    def scaled(x: Any, weight: Any, bias: Any = None, scale_a: Any = None, scale_b: Any = None, scale_c: Any = None) -> Any:
        flat = x.reshape(-1, k)
        if fp8:
            one = torch.ones((), dtype=torch.float32, device=x.device)
            scale_x = one if scale_a is None else scale_a.float().reshape(())
            scale_w = one if scale_b is None else scale_b.float().reshape(())
            wide = torch.bfloat16 if out_dtype is torch.bfloat16 else torch.float32
            out = torch._scaled_mm(flat, weight.t(), scale_x, scale_w, out_dtype=wide)
        else:
            out = torch.mm(flat.float(), weight.float().t())
            for scale in (scale_a, scale_b):
                out = out if scale is None else out * scale
        out = out if bias is None else out + bias
        out = out if scale_c is None else out * scale_c
        return out.to(out_dtype).view(*x.shape[:-1], n)

    return scaled
