"""Bind vLLM's product to a shape: its output is allocated here, its operands are views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunedgemm.plugin import Device, Launcher, PluginError, Shape
from tunedgemm.tools.launching import scale_strides, torch_dtype

from tunedgemm_vllm import experts, weights
from tunedgemm_vllm.library import GROUPED, PRODUCT, Vendor, operator, operators

#: Elements of K that share a scale of x, and the bytes of a scale.
_BLOCK, _FLOAT = 128, 4
#: Kind of product -> the operator that tells whether the library was built with it.
_QUESTIONS = {
    "fp8": "cutlass_scaled_mm_supports_fp8",
    "block": "cutlass_scaled_mm_supports_block_fp8",
    "grouped": "cutlass_group_gemm_supported",
}


def kernels_of(shape: Shape) -> dict[str, bool]:
    """Return the names of the solutions, and whether repeated runs of each give equal bits."""
    return dict(weights.kernels_of(shape)) if shape.op == "a16wn" else {GROUPED if shape.op == "fmoe" else PRODUCT: True}


def refusal(operators: Any, shape: Shape, device: Device) -> str:
    """Return why the library was built without the product, or "" where it has it."""
    if shape.op == "a16wn":
        return ""
    kind = "grouped" if shape.op == "fmoe" else "block" if shape.scale == "block" else "" if shape.dtype == "int8" else "fp8"
    question = getattr(operators, _QUESTIONS.get(kind, ""), None)
    if question is None or question(int(device.gfx.removeprefix("sm_"))):
        return ""
    return f"vllm: its library was built without {kind} products for {device.gfx}; install a wheel of a newer CUDA"


def bind(vendor: Vendor, kernel: str, shape: Shape, device: Device) -> Launcher:
    """Return the launcher of a kernel for exactly this shape.

    Raises:
        PluginError: the library lacks an operator, or one takes other arguments.
    """
    if reason := refusal(operators(vendor), shape, device):
        raise PluginError(reason)
    if shape.op == "a16wn":
        return weights.bind(vendor, kernel, shape, device)
    if shape.op == "fmoe":
        return experts.bind(vendor, shape)
    product = operator(vendor, PRODUCT)
    return _by_block(product, shape) if shape.scale == "block" else Launcher(_by_row(product, shape))


def _by_row(product: Callable[..., None], shape: Shape) -> Callable[..., Any]:
    """Make a launcher of scales by tensor or row; one value stands for all rows."""
    import torch

    empty, dtype, m, n, k = torch.empty, torch_dtype(shape.outdtype), shape.m, shape.n, shape.k

    def call(x: Any, weight: Any, x_scale: Any, w_scale: Any, bias: Any = None) -> Any:
        out = empty((m, n), dtype=dtype, device=x.device)
        product(out, x.view(m, k), weight.t(), x_scale, w_scale, None if bias is None else bias.view(n))
        return out if x.dim() == 2 else out.view(*x.shape[:-1], n)

    return call


def _by_block(product: Callable[..., None], shape: Shape) -> Launcher:
    """Make a launcher of block scales; it copies those of x that are not M-major without padding."""
    import torch

    empty, dtype, m, n, k = torch.empty, torch_dtype(shape.outdtype), shape.m, shape.n, shape.k
    blocks, (along_m, along_k) = -(-k // _BLOCK), scale_strides(shape)
    copies = blocks > 1 and (along_k != m or (along_m != 1 and m > 1))

    def call(x: Any, weight: Any, x_scale: Any, w_scale: Any) -> Any:
        out = empty((m, n), dtype=dtype, device=x.device)
        scales = x_scale.view(m, blocks)
        if copies:
            scales = scales.t().contiguous().t()
        product(out, x.view(m, k), weight.t(), scales, w_scale.t(), None)
        return out if x.dim() == 2 else out.view(*x.shape[:-1], n)

    return Launcher(call, workspace_bytes=blocks * m * _FLOAT if copies else 0)
