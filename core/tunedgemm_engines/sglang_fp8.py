"""Routes of SGLang's fp8 layers: their products, after SGLang's own quantisation of the activations.

SGLang's products do not know their layer, so the sizes of the weight identify a route. One call of
the layer shows its product and scales, which depend on the quantisation method, on the GPU and on
SGLang's options. It has several rows: those of one row are also one of the tensor, in every order.
"""

from __future__ import annotations

import pkgutil
import weakref
from collections.abc import Callable
from typing import Any

import torch
from tunedgemm import gemm_a8w8, gemm_a8w8_blockscale
from tunedgemm.integrations import plain, with_order
from tunedgemm.plugin import Shape
from tunedgemm.tools.launching import short_dtype

from tunedgemm_engines.bit_classes import is_on
from tunedgemm_engines.routes import Route, add_layer, adds_bias, product
from tunedgemm_engines.rows import record_unrouted, unserved_reason
from tunedgemm_engines.scales import TELLING_ROWS, is_one_a_row, known_order, one_a_row, scales_for_rows

_UTILS = "sglang.srt.layers.quantization.fp8_utils"
#: Products with scales of tokens and channels, which SGLang has on CUDA alone; with scales of
#: blocks, by SGLang's two kernels.
CHANNEL = f"{_UTILS}.fp8_scaled_mm"
BLOCKS = (f"{_UTILS}.w8a8_block_fp8_matmul_deepgemm", f"{_UTILS}.w8a8_block_fp8_matmul_triton")
_BLOCK = 128

#: Target, N, K and output dtype of a routed product to the name of its route.
_routes: dict[tuple[str, int, int, torch.dtype], str] = {}
#: Where `_probe` collects the products of a layer: the target and the operands in the order of a
#: route.
_probed: list[tuple[str, tuple[Any, ...]]] | None = None


def original_of(target: str) -> Callable[..., Any]:
    """Return SGLang's own function inside our wrapper."""
    function: Any = pkgutil.resolve_name(target)
    return getattr(function, "__wrapped__", function)  # type: ignore[no-any-return]


def _probe(module: Any, x: torch.Tensor) -> list[tuple[str, tuple[Any, ...]]]:
    """Run a layer once, and return its products."""
    global _probed
    _probed = []
    try:
        with torch.inference_mode():
            module.quant_method.apply(module, x)
        return _probed
    finally:
        _probed = None


def route_fp8(name: str, module: Any, dtype: torch.dtype) -> None:
    """Route the product of an fp8 layer of any quantisation method.

    Args:
        name: name of the layer.
        module: the loaded layer.
        dtype: dtype of the activations.
    """
    sizes = module.weight.shape
    k = sizes[1] if module.weight.is_contiguous() else sizes[0]  # a weight with scales of channels is a view [K, N]
    try:
        calls = _probe(module, torch.randn(TELLING_ROWS, k, dtype=dtype, device=module.weight.device))
    except Exception as error:  # SGLang's kernels may raise anything
        record_unrouted(f"a call of the layer failed: {error}", name)
        return
    if len(calls) != 1:
        record_unrouted("SGLang multiplies it by a kernel that is not routed", name)
        return
    [(target, (_, weight, x_scale, w_scale, _))] = calls
    n, block = weight.shape[0], target in BLOCKS
    blocks = (-(-n // _BLOCK), -(-k // _BLOCK))
    known = (x_scale.dtype, w_scale.dtype) == (torch.float32, torch.float32)
    if block:
        known = known and tuple(x_scale.shape) == (TELLING_ROWS, blocks[1])
        known = known and tuple(w_scale.shape) == blocks and w_scale.is_contiguous()
    else:
        known = known and is_one_a_row(x_scale, TELLING_ROWS) and w_scale.numel() == n
    if not known:
        record_unrouted(f"tables have no such kind of scales (x {_said(x_scale)}, weight {_said(w_scale)})", name)
        return
    op, scale = ("a8w8_blockscale", "block") if block else ("a8w8", "row")
    if is_on(op) and x_scale.numel() == 1 and getattr(module, "input_scale", None) is None:
        record_unrouted("one scale for all rows of x depends on the batch", name)
        return
    if unserved_reason(op, n, k, scale=scale, dtype="fp8", layer=name):
        return
    biased = adds_bias(module) and not block  # SGLang adds the bias after a product with scales of blocks
    weight_dtype, epilogue = short_dtype(module.weight.dtype), "bias" if biased else "none"
    shape = Shape(op, 1, n, k, weight_dtype, outdtype=short_dtype(dtype), scale=scale, epilogue=epilogue)
    if block:
        shape = with_order(shape, known_order(x_scale))
    _routes[(target, n, k, dtype)] = add_layer(_route(target, module, shape, dtype), module, name).name


def _said(scale: torch.Tensor) -> str:
    """Describe scales for a reason."""
    return f"{scale.dtype} {list(scale.shape)}".removeprefix("torch.")


def _route(target: str, module: Any, shape: Shape, dtype: torch.dtype) -> Route:
    """Make the route of a product."""
    block, biased, device, multiply = target in BLOCKS, shape.epilogue == "bias", module.weight.device, original_of(target)
    first, scales = weakref.ref(module), scales_for_rows(shape)

    def ours(x: torch.Tensor, weight: torch.Tensor, xs: torch.Tensor, ws: torch.Tensor, bias: torch.Tensor | None) -> Any:
        if block:
            return gemm_a8w8_blockscale(x, weight, scales(xs), ws, dtype)
        return gemm_a8w8(x, weight, one_a_row(xs, x.shape[0]), ws.reshape(-1), bias, dtype)

    def theirs(x: torch.Tensor, weight: torch.Tensor, xs: torch.Tensor, ws: torch.Tensor, bias: torch.Tensor | None) -> Any:
        if block:
            return multiply(x, weight, xs, ws, [_BLOCK, _BLOCK], output_dtype=dtype)
        return multiply(x, weight.t(), xs, ws, out_dtype=dtype, bias=bias)

    def inputs(m: int) -> tuple[Any, ...]:
        [(_, (x, _, x_scale, _, _))] = _probe(first(), torch.randn(m, shape.k, dtype=dtype, device=device))
        return x, x_scale

    def operands(quantised: tuple[Any, ...], layer: Any) -> tuple[Any, ...]:
        scales = layer.weight_scale if getattr(layer, "weight_scale_inv", None) is None else layer.weight_scale_inv
        weight = plain(layer.weight)
        return quantised[0], weight if block else weight.t(), quantised[1], plain(scales), plain(layer.bias) if biased else None

    name = f"{shape} {target.rpartition('.')[2]}"
    return Route(name=name, shape=shape, device=device, ours=ours, theirs=theirs, inputs=inputs, operands=operands, engine="SGLang")


def _routed_product(
    target: str, x: torch.Tensor, weight: torch.Tensor, xs: Any, ws: Any, bias: Any, dtype: torch.dtype
) -> torch.Tensor | None:
    """Multiply by a routed weight [N, K]; return None if SGLang must do it."""
    if _probed is not None:
        _probed.append((target, (x, weight, xs, ws, bias)))
        return None
    route = _routes.get((target, weight.shape[0], weight.shape[1], dtype))
    # A layer of the same sizes may have a single scale of the weight.
    known = route is not None and xs.dtype is torch.float32 and (target in BLOCKS or ws.numel() == weight.shape[0])
    return product(x, weight, xs, ws, bias, dtype, route) if known else None


def _channel_product(
    theirs: Callable[..., Any], x: torch.Tensor, weight: torch.Tensor, xs: torch.Tensor, ws: torch.Tensor, out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    """Multiply with scales of tokens and channels: ``fp8_scaled_mm``, whose weight is a view [K, N]."""
    out = _routed_product(CHANNEL, x, weight.t(), xs, ws, bias, out_dtype)
    return theirs(x, weight, xs, ws, out_dtype=out_dtype, bias=bias) if out is None else out


def _block_product(target: str) -> Callable[..., Any]:
    """Make the hook around a product with scales of blocks."""

    def multiply(
        theirs: Callable[..., Any], x: torch.Tensor, weight: torch.Tensor, xs: torch.Tensor, ws: torch.Tensor, block_size: Any,
        output_dtype: torch.dtype = torch.float16,
    ) -> Any:  # fmt: skip
        out = _routed_product(target, x, weight, xs, ws, None, output_dtype) if tuple(block_size) == (_BLOCK, _BLOCK) else None
        return theirs(x, weight, xs, ws, block_size, output_dtype=output_dtype) if out is None else out

    return multiply


#: SGLang's functions to their wrappers.
HOOKS: dict[str, Callable[..., Any]] = {CHANNEL: _channel_product, **{target: _block_product(target) for target in BLOCKS}}
