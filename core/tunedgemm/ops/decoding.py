"""Shared by ops whose operands a record of `tunedgemm.ops.weight_formats` decodes.

These are a16wn and a16w4_blockscale, which decode the weight, and a4w4_blockscale, a8w8_mxfp8 and
a4w4_nvfp4, which decode both sides. The names of operands say which is which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from tunedgemm.dtype import dtype_bits, torch_dtype
from tunedgemm.ops import quantised
from tunedgemm.ops.op import taken
from tunedgemm.ops.product import exact_dtype, exact_product
from tunedgemm.ops.repacked import PACKINGS, stored_as
from tunedgemm.ops.scale_order import ROW, SHUFFLED, SWIZZLED, SWIZZLED_8, field_of
from tunedgemm.ops.weight_formats import format_of, group_of
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch

    from tunedgemm.ops.formats.weight_only import Weight

_MX = ("x", "weight", "x_scale", "w_scale", "bias?")
#: Operands of each op; optional ones end in ``?``.
OPERANDS = {
    "a16wn": ("x", "weight", "w_scale", "w_zeros?", "w_index?", "w_global_scale?", "bias?"),
    "a16w4_blockscale": ("x", "weight", "w_scale", "bias?"),
    "a4w4_blockscale": _MX,
    "a8w8_mxfp8": _MX,
    "a4w4_nvfp4": (*_MX[:4], "x_global_scale", "w_global_scale", "bias?"),
}


@attrs.frozen(eq=False)
class Decoded:
    """Operands of a product, each value times its scale.

    Attributes:
        x, weight: [m, k] and [n, k].
        factors: global scales, which multiply the product.
        bias: the bias, or None.
    """

    x: torch.Tensor
    weight: torch.Tensor
    factors: tuple[torch.Tensor, ...]
    bias: torch.Tensor | None


def decoded(shape: Shape, operands: tuple[Any, ...], dtype: torch.dtype) -> Decoded:
    """Decode the operands of a call to *dtype*."""
    from tunedgemm.ops.formats.shuffle import unshuffle_weight
    from tunedgemm.ops.formats.weight_only import Weight, decode

    form, given = format_of(shape), _by_name(shape, operands)
    if shape.layout in PACKINGS:
        return _decoded_of_engine(shape, given, dtype)
    x, weight, scale, order = given["x"], given["weight"], given["w_scale"], order_of_weight(field_of(shape))
    if "x_scale" in given:
        x = x.reshape(-1, shape.k // form.per)
        x = decode(form, Weight(x, in_rows(shape, given["x_scale"], field_of(shape), len(x))), dtype)
    weight = weight if shape.layout == "row" else unshuffle_weight(weight, shape.layout)
    scale = scale if order == ROW else in_rows(shape, scale, order, shape.n)
    values = decode(form, Weight(weight, scale, given.get("w_zeros"), given.get("w_index")), dtype)
    factors = tuple(given[name] for name in ("x_global_scale", "w_global_scale") if given.get(name) is not None)
    return Decoded(x.reshape(-1, shape.k).to(dtype), values, factors, given["bias"])


def _decoded_of_engine(shape: Shape, given: dict[str, Any], dtype: torch.dtype) -> Decoded:
    """Decode a weight that an engine repacked, whose global scale depends on its layout."""
    from tunedgemm.ops.formats.repacked import decode_repacked
    from tunedgemm.ops.formats.weight_only import Weight

    stored = Weight(*(given[name] for name in ("weight", "w_scale", "w_zeros", "w_index", "w_global_scale")))
    values, factor = decode_repacked(shape, stored, dtype)
    return Decoded(given["x"].reshape(-1, shape.k).to(dtype), values, () if factor is None else (factor,), given["bias"])


def reference(shape: Shape, operands: tuple[Any, ...]) -> torch.Tensor:
    """Compute the exact product of the decoded operands, with global scales and the bias."""
    wide = exact_dtype(shape.m, shape.n, shape.k)
    parts = decoded(shape, operands, wide)
    out = exact_product(parts.x, parts.weight, wide)
    for factor in parts.factors:
        out = out.mul_(factor.to(wide))
    return out if parts.bias is None else out.add_(parts.bias.to(wide).reshape(1, -1))


def make_inputs(shape: Shape, device: torch.device, seed: int) -> tuple[Any, ...]:
    """Draw normal operands, quantised to the shape's format, layout and order, and its bias [n]."""
    import torch

    from tunedgemm.ops.formats.repacked import repack_weight
    from tunedgemm.ops.formats.shuffle import shuffle_weight
    from tunedgemm.ops.formats.weight_only import quantise

    generator, form, group = torch.Generator(device).manual_seed(seed), format_of(shape), group_of(shape)
    dtype, order, index = torch_dtype(shape.dtype), field_of(shape), None
    x, values = (quantised.draw(rows, shape.k, group or 32, generator) for rows in (shape.m, shape.n))
    given: dict[str, Any] = {"x": x.to(dtype)} if _is_wide(shape) else _operands("x", quantise(form.name, x), dtype, order)
    if form.has_index:
        groups = torch.arange(shape.k, device=device, dtype=torch.int32) // (group or shape.k)
        index = groups[torch.randperm(shape.k, generator=generator, device=device)]
    stored = quantise(form.name, values, group, dtype=dtype, index=index)
    if shape.layout in PACKINGS:
        given |= attrs.asdict(repack_weight(stored, form.name, shape.layout, dtype), recurse=False)
    else:
        given |= _operands("w", stored, torch_dtype(form.dtypes[0]), order_of_weight(order))
        given["weight"] = given["w"] if shape.layout == "row" else shuffle_weight(given["w"], shape.layout)
    given["bias"] = next(iter(quantised.draw_bias(shape, generator)), None)
    operands = tuple(given[name] for name in _names(shape))
    while operands[-1] is None:
        operands = operands[:-1]
    return operands


def _operands(side: str, stored: Weight, dtype: torch.dtype, order: str) -> dict[str, Any]:
    """Return the operands of one side, ``x`` or ``w``, by name."""
    given = {f"{side}_{name}": getattr(stored, f"w_{name}") for name in ("zeros", "index", "global_scale")}
    return {side: stored.weight.view(dtype), f"{side}_scale": in_order(stored.w_scale, order), **given}


def some_rows(shape: Shape, operands: tuple[Any, ...], indices: torch.Tensor) -> tuple[Any, ...]:
    """Return the operands of some rows of x, whose scales may be in tiles: `Op.some_rows`."""
    import torch

    given, order = _by_name(shape, operands), field_of(shape)
    x, scale = given["x"], given["x_scale"]
    rows = taken(x.view(torch.uint8).reshape(shape.m, x.shape[-1]), indices).view(x.dtype)
    scales = taken(in_rows(shape, scale, order, shape.m).view(torch.uint8), indices).view(scale.dtype)
    return (rows, operands[1], in_order(scales, order), *operands[3:])


def bytes_moved(shape: Shape) -> int:
    """Count the bytes of each operand and the output once; padding does not count."""
    form, group = format_of(shape), group_of(shape)
    of_x = shape.m * shape.k * dtype_bits(shape.dtype) if _is_wide(shape) else form.stored_bits(shape.m, shape.k, group)
    of_weight = stored_as(form, shape.layout).stored_bits(shape.n, shape.k, group)
    of_bias = shape.n * dtype_bits(shape.bias_dtype) if shape.bias else 0
    return (of_x + of_weight + of_bias + shape.m * shape.n * dtype_bits(shape.outdtype)) // 8


def order_of_weight(order: str) -> str:
    """Return the order of w_scale for a field ``scale_order``: 8x4 is of x alone."""
    return SWIZZLED if order == SWIZZLED_8 else order


def in_rows(shape: Shape, scale: torch.Tensor, order: str, rows: int) -> torch.Tensor:
    """Return scales of an order as row-major [rows, groups]."""
    from tunedgemm.ops.formats.scales import unshuffle_scale, unswizzle_scale

    groups = shape.k // group_of(shape)
    if order == ROW:
        return scale.reshape(rows, groups)
    return unshuffle_scale(scale, rows, groups) if order == SHUFFLED else unswizzle_scale(scale, rows, groups, order)


def in_order(scale: torch.Tensor, order: str) -> torch.Tensor:
    """Return row-major scales in an order."""
    from tunedgemm.ops.formats.scales import shuffle_scale, swizzle_scale

    if order == ROW:
        return scale
    return shuffle_scale(scale) if order == SHUFFLED else swizzle_scale(scale, order)


def _is_wide(shape: Shape) -> bool:
    """Check that x has 16 bits, so that the weight alone is decoded."""
    return shape.dtype not in format_of(shape).dtypes


def _names(shape: Shape) -> tuple[str, ...]:
    return tuple(name.removesuffix("?") for name in OPERANDS[shape.op])


def _by_name(shape: Shape, operands: tuple[Any, ...]) -> dict[str, Any]:
    names = _names(shape)
    return dict(zip(names, (*operands, *[None] * (len(names) - len(operands))), strict=True))
