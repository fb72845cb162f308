"""Formats of fmoe's weights, scales and activations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import OperandError
from tunedgemm.ops.e8m0 import E8m0Scale, e8m0_order, shuffled_sizes
from tunedgemm.ops.moe_options import options_of
from tunedgemm.ops.moe_words import BLOCK_ROWS, DTYPES, NAME, PACKED
from tunedgemm.ops.scale_order import E8M0_ORDERS, ROW, SHUFFLED, has_e8m0_scales, scale_order, with_order
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch

#: Columns per scale in block scaling, and elements per scale in per_1x32.
_BLOCK, _GROUP = 128, 32


def packed(shape: Shape) -> int:
    """Return the number of values per element in the weights' last dimension."""
    return 2 if shape["q_dtype_w"] in PACKED else 1


def scale_shape(shape: Shape, rows: int, cols: int) -> tuple[int, ...]:
    """Return the shape of the scales of weights [expert, rows, cols]; () for none.

    cols counts values. Shuffled e8m0 scales are flattened over experts and padded to multiples of
    (256, 8). int4 scales have the groups before the rows.
    """
    experts, kind = int(shape["expert"]), str(shape["q_type"])
    if kind == "per_1x32" and shape["q_dtype_w"] == "int4":
        return experts, cols // _GROUP, rows
    if scale_order(shape) == SHUFFLED:
        return shuffled_sizes(experts * rows, cols // _GROUP)
    if kind in BLOCK_ROWS:
        return experts, -(-rows // BLOCK_ROWS[kind]), -(-cols // _BLOCK)
    return {"No": (), "per_Tensor": (experts,), "per_Token": (experts, rows, 1), "per_1x32": (experts, rows, cols // _GROUP)}[kind]


def stage_rows(shape: Shape) -> int:
    """Return the rows of an expert's w1: inter_dim, or twice that with a gate."""
    return shape.k * (2 if shape["g1u1"] else 1)


def with_scale_order(shape: Shape, stated: str | None, w1_scale: torch.Tensor | None, w2_scale: torch.Tensor | None) -> Shape:
    """Return the shape of a call with the order of its e8m0 scales.

    Args:
        stated: the caller's ``scale_order``, or None.

        Raises:
        OperandError: the order is ambiguous, or is stated for scales that are not e8m0.
    """
    if not has_e8m0_scales(shape):
        if stated:
            raise OperandError(f"fmoe: scale_order applies to e8m0 scales, of QuantType.per_1x32 (got {stated!r} with {shape['q_type']})")
        return shape
    sizes = {"w1_scale": (w1_scale, stage_rows(shape), shape.n), "w2_scale": (w2_scale, shape.n, shape.k)}
    given = tuple(
        E8m0Scale(name, scale, *(e8m0_forms(shape, order, rows, cols) for order in E8M0_ORDERS))
        for name, (scale, rows, cols) in sizes.items()
        if scale is not None
    )
    order = e8m0_order(NAME, given, shape.layout, stated)
    return with_order(shape, order) if order else shape


def e8m0_forms(shape: Shape, order: str, rows: int, cols: int) -> tuple[tuple[int, ...], ...]:
    """Return the valid sizes of e8m0 scales of weights [E, rows, cols] in an order.

    Unpadded scales may have a leading expert dimension.
    """
    experts, groups = int(shape["expert"]), cols // _GROUP
    flat, by_expert = (experts * rows, groups), (experts, rows, groups)
    if order == ROW:
        return by_expert, flat
    padded = shuffled_sizes(*flat)
    return (padded, by_expert) if padded == flat else (padded,)


def quantised(
    values: torch.Tensor, shape: Shape, word: str, scale: torch.Tensor | None = None, rows: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise values [R, C] by a shape's q_type; return (quantised values, scales).

    Args:
        word: short dtype of the result.
        scale: one value for per_Tensor; None to compute it from amax.
        rows: rows per block of scales.
    """
    from tunedgemm.ops.formats import int4, mxfp4, mxfp8, quant

    kind, dtype = str(shape["q_type"]), torch_dtype(word)
    if dtype is int4.INT4:
        return int4.per_1x32_i4_quant(values)
    if kind == "per_1x32":
        return mxfp4.per_1x32_f4_quant(values) if dtype is mxfp4.FP4 else mxfp8.per_1x32_f8_quant(values, dtype)
    if kind in BLOCK_ROWS:
        return quant.per_block_quant(values, dtype, (rows, _BLOCK))
    return (quant.per_tensor_quant if kind == "per_Tensor" else quant.pertoken_quant)(values, scale, quant_dtype=dtype)


def as_quantised(x: torch.Tensor, shape: Shape, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Quantise and dequantise activations [R, C] to *dtype*, as a stage's input.

    Args:
        scale: as for `quantised`.
    """
    word = str(shape["q_dtype_a"])
    if word in DTYPES or x.numel() == 0:
        return x.to(dtype)
    return dequantised(*quantised(x.float(), shape, word, scale), shape, dtype)


def stage1_input(hidden: torch.Tensor, shape: Shape, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return the hidden states [T, model_dim] as stage 1 multiplies them, in *dtype*.

    Args:
        scale: the scale of quantised hidden states, else as for `as_quantised`.
    """
    import torch

    if not options_of(shape).quantised:
        return as_quantised(hidden, shape, scale, dtype)
    assert scale is not None
    scale = scale.view(torch.uint8)[: shape.m] if shape["q_type"] == "per_1x32" else scale  # AITER pads rows
    return dequantised(hidden, scale, shape, dtype)


def ordered_weight(weight: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Return weights [expert, rows, cols] unshuffled, with int4 unpacked to int8 values."""
    from tunedgemm.ops.formats import int4
    from tunedgemm.ops.formats.shuffle import unshuffle_weight

    if shape["q_dtype_w"] != "int4":
        return weight if shape.layout == "row" else unshuffle_weight(weight, shape.layout)
    return unshuffle_weight(int4.unpack_shuffled_int4(getattr(weight, "plain", weight)), shape.layout)


def plain_scale(scale: torch.Tensor | None, shape: Shape, rows: int, cols: int) -> torch.Tensor | None:
    """Return the scales of weights [expert, rows, cols] as [expert, ...], row-major; None if absent."""
    import torch

    from tunedgemm.ops.formats.scales import unshuffle_scale

    if scale is None:
        return None
    wanted, experts = scale_shape(shape, rows, cols), int(shape["expert"])
    if shape["q_dtype_w"] == "int4":
        if scale.dim() != 3 and scale.dtype is torch.bfloat16:
            scale = scale.reshape(experts, cols // _GROUP // 2, rows, 2).transpose(2, 3)
        return scale.reshape(wanted).transpose(1, 2).contiguous()
    if scale_order(shape) == SHUFFLED:
        return unshuffle_scale(scale.reshape(wanted), experts * rows, cols // _GROUP).reshape(experts, rows, cols // _GROUP)
    return scale.reshape(wanted)


def expert_weight(weight: torch.Tensor, scale: torch.Tensor | None, expert: int, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Return one expert's matrix [rows, cols] in *dtype*, dequantised.

    Args:
        weight: from `ordered_weight` (cols / 2 for fp4x2).
        scale: from `plain_scale`.
    """
    import torch

    if shape["q_dtype_w"] == "fp4x2":  # torch cannot index 4-bit tensors
        weight = weight.view(torch.uint8)
    one = weight[expert : expert + 1]
    return dequantised(one, None if scale is None else scale[expert : expert + 1], shape, dtype)[0]


def dequantised(values: torch.Tensor, scale: torch.Tensor | None, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Dequantise activations [R, C] or expert weights [E, rows, cols] to *dtype*."""
    import torch

    from tunedgemm.ops.formats import mxfp4, mxfp8, quant

    kind = str(shape["q_type"])
    if scale is None:
        return values.to(dtype)
    if values.dtype in (mxfp4.FP4, torch.uint8):
        return mxfp4.dequant_fp4(values, scale, dtype)
    if kind == "per_1x32":
        return mxfp8.dequant_1x32(values, scale, dtype)
    if kind in BLOCK_ROWS:
        return quant.dequant_blocks(values, scale, dtype, (BLOCK_ROWS[kind] if values.dim() == 3 else 1, _BLOCK))
    by_row = scale.reshape(len(values), -1, 1).expand(-1, values.shape[1], 1) if values.dim() == 3 else scale
    return quant.dequant_rows(values, by_row, dtype)
