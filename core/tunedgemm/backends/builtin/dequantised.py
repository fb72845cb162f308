"""Route ``dequantised`` of a16wn: the weight is decoded once and kept, then a call is one of a16w16.

The tables of a16w16 choose its kernel. The weight is kept in the dtype of x: exact where the record
of its format says so, else rounded once. A global scale multiplies the product in float32.
"""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs

from tunedgemm.backends.builtin.decoding import weight_of_any_format as decoding
from tunedgemm.backends.builtin.product import finish
from tunedgemm.backends.builtin.route import Family, Route
from tunedgemm.backends.kept_weights import LIMIT, kept, limit
from tunedgemm.device import Device
from tunedgemm.dtype import torch_dtype
from tunedgemm.ops.weight_formats import format_of, group_of
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


def tuned_call() -> Callable[..., torch.Tensor]:
    """Return the package's ``call``; the tables that it reads are above the backends."""
    call: Callable[..., torch.Tensor] = importlib.import_module(__name__.partition(".")[0]).call
    return call


def _dequantised(shape: Shape, device: Device) -> Callable[..., Any]:
    """Look up the kept weight, then call a16w16."""
    import torch

    from tunedgemm.ops.formats.weight_only import Weight, decode

    del device
    form, n, out_dtype, inner = format_of(shape), shape.n, torch_dtype(shape.outdtype), torch_dtype(shape.dtype)
    key, nbytes, product = (form.name, group_of(shape), inner), n * shape.k * inner.itemsize, tuned_call()

    def decoded(*operands: torch.Tensor | None) -> torch.Tensor:
        return decode(form, Weight(*operands), inner)  # type: ignore[arg-type]

    def dequantised(x: torch.Tensor, *operands: Any) -> torch.Tensor:
        values, bias = kept(operands[:4], key, nbytes, decoded), operands[5] if len(operands) > 5 else None
        if not form.has_global:
            return product("a16w16", x, values, bias, otype=out_dtype)
        out = product("a16w16", x, values, otype=torch.float32)
        if bias is None and out_dtype is not torch.float32:  # rounded in the same pass over the output
            return torch.mul(out, operands[4], out=torch.empty_like(out, dtype=out_dtype))
        return finish(out.mul_(operands[4]), bias, out_dtype, (*x.shape[:-1], n))

    return dequantised


def _unfit(shape: Shape, device: Device) -> str:
    """Return why no weight is kept, or why one in the dtype of x is too coarse; "" if neither."""
    del device
    form, dtype = format_of(shape), shape.dtype
    if shape.layout != "row":
        return f"decodes weights in the checkpoint's layout, not {shape.layout}"
    if dtype == "fp16" and {"fp32", "e8m0"} & set(form.scale):
        return f"has less range than scales in {form.scale[0]}"
    if dtype not in form.exact and shape.outdtype != dtype:
        return f"rounds values of {form.name}, too coarse for {shape.outdtype}"
    size = shape.n * shape.k * torch_dtype(dtype).itemsize
    return "" if limit() >= size else f"keeps {size:,} bytes for each weight; set {LIMIT}, such as to 8GiB (now {limit():,} bytes)"


family: Family = attrs.evolve(
    decoding, routes=MappingProxyType({**decoding.routes, "dequantised": Route(_dequantised, _unfit, keeps_weights=True, is_nested=True)})
)
