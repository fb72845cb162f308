"""Routes of a16wn: the weight is decoded in each call.

Launcher operands: x [..., K], weight, w_scale, then w_zeros, w_index, w_global_scale and bias [N],
each absent where the format has none. A global scale multiplies the product in float32. A process
that lowers the precision of float32 products lowers it in ``float32``, too.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tunedgemm.backends.builtin.product import finish
from tunedgemm.backends.builtin.route import Family, Route
from tunedgemm.device import Device
from tunedgemm.dtype import torch_dtype
from tunedgemm.ops.weight_formats import format_of
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch


def _decoded(dtype: str = "") -> Callable[[Shape, Device], Callable[..., Any]]:
    """Decode the weight to *dtype*, by default that of x, then multiply in it."""

    def make(shape: Shape, device: Device) -> Callable[..., Any]:
        import torch

        from tunedgemm.ops.formats.repacked import decoded as decoded_weight
        from tunedgemm.ops.formats.weight_only import Weight

        del device
        n, k, out_dtype = shape.n, shape.k, torch_dtype(shape.outdtype)
        inner, is_plain = torch_dtype(dtype or shape.dtype), not dtype and _is_plain(shape)

        def decoded(x: torch.Tensor, *operands: Any) -> torch.Tensor:
            values, factor = decoded_weight(shape, Weight(*operands[:5]), inner)
            bias = operands[5] if len(operands) > 5 else None
            if is_plain:
                return torch._C._nn.linear(x, values, None if bias is None else bias.view(n))
            flat = x.reshape(-1, k)
            out = torch.mm(flat.float(), values.t()) if dtype else torch.mm(flat, values.t(), out_dtype=torch.float32)
            out = out if factor is None else out.mul_(factor)
            return finish(out, bias, out_dtype, (*x.shape[:-1], n))

        return decoded

    return make


def _is_plain(shape: Shape) -> bool:
    """Return whether torch's linear has the shape's output and bias, with nothing after it."""
    same = shape.outdtype == shape.dtype and shape.bias_dtype in ("", shape.dtype)
    return same and not format_of(shape).has_global


def _unfit(shape: Shape, device: Device) -> str:
    """Return why a weight or product in the dtype of x is too coarse for the output; "" if not."""
    form, dtype = format_of(shape), shape.dtype
    if dtype == "fp16" and {"fp32", "e8m0"} & set(form.scale):
        return f"has less range than scales in {form.scale[0]}"
    if device.kind == "cpu" and not _is_plain(shape):
        return f"rounds to {dtype} on a CPU before the global scale, bias and output"
    if dtype not in form.exact and shape.outdtype != dtype:
        return f"rounds values of {form.name}, too coarse for {shape.outdtype}"
    return ""


def _native(shape: Shape, device: Device) -> str:
    return family.first(shape, device, "decoded", "float32")


family = Family(
    MappingProxyType({"decoded": Route(_decoded(), _unfit), "float32": Route(_decoded("fp32"))}),
    _native,
    lambda _, call: call,
)
