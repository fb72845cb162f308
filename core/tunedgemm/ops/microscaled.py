"""a8w8_mxfp8, a4w4_nvfp4: ``out[..., N] = x[..., K] @ weight[N, K].T (+ bias[N])``, both scaled.

A few elements of K share a scale on both sides: 32 an e8m0 scale in mxfp8, 16 an e4m3 scale in
nvfp4, whose two global scales multiply the float32 accumulator. The formats are records, those of
`tunedgemm.ops.weight_formats`. Scales are row-major or in tiles: a field of the shape
(`tunedgemm.ops.scale_order`), which the sizes of scales do not tell.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from tunedgemm.errors import OperandError
from tunedgemm.ops import decoding, quantised
from tunedgemm.ops.domain import Domain
from tunedgemm.ops.e8m0 import check_not_shuffled
from tunedgemm.ops.hot import BF16, hot, public
from tunedgemm.ops.layout import plain_layout
from tunedgemm.ops.op import Op, unbiased
from tunedgemm.ops.scale_order import FIELD, MX_ORDERS, ROW, SWIZZLED, TILE_ROWS, field_of, stated_order, swizzled_sizes, with_order
from tunedgemm.ops.schema import BIAS, MNK, Schema, Word
from tunedgemm.ops.weight_formats import FORMAT_OF_OP
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch

#: Largest global scale that `check_values` takes: amax is the largest value of fp16.
_MOST = 65504 / 2688


def _shape_of(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    *rest: torch.Tensor | None,
    otype: torch.dtype | None = None,
    scale_order: str | None = None,
) -> Shape:
    form, order = FORMAT_OF_OP[op], ROW if scale_order is None else scale_order
    for name, operand in (("x", x), ("weight", weight)):
        quantised.check_dtype(op, name, operand, form.dtypes)
    layout = plain_layout(op, weight)
    quantised.check_matrices(op, x, weight)
    m, n, k = quantised.rows_of(x), weight.shape[0], form.per * weight.shape[1]
    bias = rest[-1] if len(rest) > 2 * form.has_global else None
    bias_dtype = quantised.bias_dtype_of(op, bias, n, x.device)
    out, epilogue = quantised.outdtype_of(op, otype), "bias" if bias_dtype else "none"
    shape = with_order(Shape(op, m, n, k, form.dtypes[0], out, epilogue, bias_dtype, "block", layout), order)
    if fault := _problem(shape):
        raise OperandError(f"{op}: {fault}")
    groups = k // form.groups[0]
    _check_scale(op, "x_scale", x_scale, order, ((m, groups), (*x.shape[:-1], groups)), x.device)
    _check_scale(op, "w_scale", w_scale, decoding.order_of_weight(order), ((n, groups),), x.device)
    if form.has_global:
        for name, scale in zip(decoding.OPERANDS[op][4:6], rest, strict=False):
            _check_global(op, name, scale, x.device)
    return shape


def _check_scale(op: str, name: str, scale: torch.Tensor, order: str, row: tuple[tuple[int, ...], ...], device: torch.device) -> None:
    """Check a scale in its order; *row* are its sizes in row-major order."""
    check_not_shuffled(op, name, scale, f"row-major or in tiles of {' or '.join(TILE_ROWS)}", *row[0])
    sizes = row
    if order != ROW:
        high, wide = swizzled_sizes(order, *row[0])
        sizes = (high, wide), (high * wide,)
    quantised.check_dtype(op, name, scale, FORMAT_OF_OP[op].scale)
    try:
        quantised.check_scale(op, name, scale, sizes, FORMAT_OF_OP[op].scale, device)
    except OperandError as error:
        other = "swizzle_scale(s) of row-major scales" if order != ROW else f"scale_order={SWIZZLED!r} for scales in tiles"
        raise OperandError(f"{error} for scale_order={order!r}; pass {other}") from None
    if order != ROW and not scale.is_contiguous():
        raise OperandError(f"{op}: {name} in tiles must be contiguous (got strides {scale.stride()}); pass {name}.contiguous()")


def _check_global(op: str, name: str, scale: torch.Tensor | None, device: torch.device) -> None:
    if scale is None:
        raise OperandError(f"{op}: {name} must be one float32 value (got None); pass amax / 2688, or 1 for one level of scales")
    quantised.check_scale(op, name, scale, ((), (1,)), ("fp32",), device)


def check_values(x_global_scale: torch.Tensor | None, w_global_scale: torch.Tensor | None) -> None:
    """Check the values of nvfp4's global scales, and their convention as far as values show it.

    Calls read no values, since that would wait for a GPU. Check a layer once, when it is loaded.

    A value above 65504 / 2688 is taken for one that divides, 2688 / amax. That is a doubt: one that
    divides is only above it for amax below 110. One that multiplies is refused where amax is
    above 65504, which bf16 can hold.

    Raises:
        OperandError: a scale is not finite, not above 0, or above 65504 / 2688.
    """
    for name, scale in (("x_global_scale", x_global_scale), ("w_global_scale", w_global_scale)):
        if scale is not None:
            quantised.check_global_scale("a4w4_nvfp4", name, scale, _MOST)


def _problem(shape: Shape) -> str:
    """Return why a shape of known dtypes is impossible; "" if it is valid."""
    if shape.k % (group := FORMAT_OF_OP[shape.op].groups[0]):
        return f"K must be a multiple of {group}, which share a scale (got K={shape.k}); pad both operands with zeros"
    order = field_of(shape)
    return "" if order in MX_ORDERS else f"{FIELD} must be {' or '.join(MX_ORDERS)} (got {order!r})"


def gemm_a8w8_mxfp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = BF16,
    *,
    scale_order: str | None = None,
) -> torch.Tensor:
    """Compute ``x[..., K] @ weight[N, K].T (+ bias)`` in mxfp8 by the solution the tables choose.

    Args:
        x, weight: activations [..., K] (M rows in all) and weight [N, K] in fp8 e4m3fn.
        x_scale, w_scale: one e8m0 scale per 32 elements of K, float8_e8m0fnu or uint8: [M, K/32]
            and [N, K/32], or from `swizzle_scale`.
        bias: [N] or [1, N] in bf16, fp16 or fp32, or absent.
        dtype: output dtype: bf16, fp16 or fp32; None for bf16.
        scale_order: ``row``, the default; ``128x4`` for scales in tiles of cuBLASLt; ``8x4`` for
            x_scale in tiles of 8x4 and w_scale in tiles of 128x4.

    Returns:
        A new tensor [..., N].

    Raises:
        OperandError: mismatched shapes, dtypes or devices.
    """
    return hot(x, weight, x_scale, w_scale, bias, scale_order, dtype)


def gemm_a4w4_nvfp4(  # noqa: PLR0913, PLR0917 - the op's operands
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    x_global_scale: torch.Tensor,
    w_global_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = BF16,
    *,
    scale_order: str | None = None,
) -> torch.Tensor:
    """Compute ``x[..., K] @ weight[N, K].T (+ bias)`` in nvfp4 by the solution the tables choose.

    Args:
        x, weight: activations [..., K/2] (M rows in all) and weight [N, K/2], float4_e2m1fn_x2 or
            uint8, the even element in the low nibble.
        x_scale, w_scale: one float8_e4m3fn scale, not negative, per 16 elements of K: [M, K/16]
            and [N, K/16], or from `swizzle_scale`.
        x_global_scale, w_global_scale: one float32 value each, which multiplies the product
            (decode convention, amax / 2688); 1 for the one-level format.
        bias, dtype, scale_order: as for `gemm_a8w8_mxfp8`.

    Returns:
        A new tensor [..., N].

    Raises:
        OperandError: mismatched shapes, dtypes or devices.
    """
    return hot(x, weight, x_scale, w_scale, x_global_scale, w_global_scale, bias, scale_order, dtype)


def _op(name: str, variable: str, function: Any, **stated: Any) -> Op:
    form, operands, order = FORMAT_OF_OP[name], decoding.OPERANDS[name], Word(FIELD, FIELD, ROW, spare=True, allowed=MX_ORDERS)
    schema = Schema({"op": name, "dtype": form.dtypes[0], "scale": "block"}, key=MNK, own=(quantised.OUTDTYPE, BIAS, order))
    example, group = quantised.example_of(schema), form.groups[0]
    domain = Domain(form.dtypes[:1], quantised.OUTDTYPES, quantised.BIAS_DTYPES, ("block",), optional=(FIELD,), further=_problem)
    return quantised.product_op(
        schema,
        variable,
        values=("libtype", "kernelName", "splitK", "us", "tflops", "bw", "errRatio"),  # none of AITER's files has these
        operands=operands,
        weights=(1, *(index for index, word in enumerate(operands) if word.startswith(("w_", "bias")))),
        shuffled_scales=(2, 3),
        shape_of=functools.partial(_shape_of, name),
        make_inputs=decoding.make_inputs,
        reference=decoding.reference,
        bytes_moved=decoding.bytes_moved,
        fields=stated_order,
        problem=domain.problem,
        unbiased=unbiased,
        some_rows=decoding.some_rows,
        examples=lambda: (
            example(1, 256, 512),
            example(127, 64, 96),  # a prime M
            example(33, 131, 3 * group, bias="True"),  # a ragged N
            example(5, 96, group, outdtype="fp32"),  # one group of K
            example(6, 130, 5 * group, bias="True", outdtype="fp32"),
            example(24, 48, 320, bias="True", outdtype="fp16"),
            example(130, 144, 320, scale_order=SWIZZLED),  # more rows than one tile
            example(7, 257, 128, scale_order=SWIZZLED, outdtype="fp32"),
            example(9, 48, 7 * group, scale_order="8x4", bias="True"),
            example(0, 256, 512),  # an empty batch
            example(0, 48, 96, scale_order=SWIZZLED),
        ),
        large=lambda: tuple(example(*sizes, scale_order=SWIZZLED) for sizes in ((16, 4096, 4096), (1024, 6144, 4096), (4099, 2112, 1408))),
        entry=public(function, operands, (FIELD,)),
        **stated,
    )


mxfp8 = _op("a8w8_mxfp8", "AITER_CONFIG_GEMM_A8W8_MXFP8", gemm_a8w8_mxfp8, functions=("gemm_a8w8_mxfp8",))
nvfp4 = _op("a4w4_nvfp4", "AITER_CONFIG_GEMM_A4W4_NVFP4", gemm_a4w4_nvfp4, functions=("gemm_a4w4_nvfp4",))
