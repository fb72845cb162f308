"""Share code of both a8w8_blockscale ops: fp8, float32 scales per 1x128 of x, 128x128 of the weight."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tunedgemm.dtype import FP8, dtype_bits, torch_dtype
from tunedgemm.errors import OperandError
from tunedgemm.ops import quantised
from tunedgemm.ops.domain import Domain
from tunedgemm.ops.product import exact_dtype, exact_product
from tunedgemm.ops.scale_order import BLOCK, FIELD, ORDERS, ROW, blocks, field_of, scale_order, scale_strides
from tunedgemm.ops.schema import MNK, Dtype, Schema, ShuffledLayout, Word
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch

OPERANDS = ("x", "weight", "x_scale", "w_scale")
WEIGHTS = (1, 3)


def schema(op: str, layout: str) -> Schema:
    """Return the columns of *op*; *layout* is the one of AITER's rows, ``row`` for plain weights."""
    dtype = Dtype("dtype", "dtype", FP8, allowed=quantised.FP8)
    order = Word(FIELD, FIELD, ROW, spare=True, allowed=ORDERS)
    own = (dtype, quantised.OUTDTYPE, order) if layout == "row" else (ShuffledLayout(), dtype, quantised.OUTDTYPE)
    return Schema({"op": op, "scale": "block"}, MNK, own)


def domain(layout: str) -> Domain:
    """Return the domain of an op; *layout* as in `schema`."""
    plain = layout == "row"
    return Domain(
        quantised.FP8,
        quantised.OUTDTYPES,
        scales=("block",),
        layouts="row" if plain else "shuffled",
        optional=(FIELD,) if plain else (),
        further=_order_problem,
    )


def _order_problem(shape: Shape) -> str:
    order = field_of(shape)
    return "" if order in ORDERS else f"{FIELD} must be {' or '.join(ORDERS)} (got {order})"


def shape_of(op: str, layout: str, operands: tuple[torch.Tensor, ...], otype: torch.dtype | None) -> Shape:
    """Return the shape of a call whose weight has that layout.

    Raises OperandError for operands that do not fit each other.
    """
    x, weight, x_scale, w_scale = operands
    quantised.check_matrices(op, x, weight)
    dtype = quantised.check_dtypes(op, x, weight, quantised.FP8)
    m, (n, k) = quantised.rows_of(x), weight.shape
    quantised.check_not_packed(op, x_scale=x_scale, w_scale=w_scale)
    quantised.check_scale(op, "x_scale", x_scale, ((m, blocks(k)), (*x.shape[:-1], blocks(k))), ("fp32",), x.device)
    quantised.check_scale(op, "w_scale", w_scale, ((blocks(n), blocks(k)),), ("fp32",), x.device)
    return Shape(op=op, m=m, n=n, k=k, dtype=dtype, outdtype=quantised.outdtype_of(op, otype), scale="block", layout=layout)


def make_inputs(shape: Shape, device: torch.device, seed: int) -> tuple[torch.Tensor, ...]:
    """Draw x [m, k] and plain weight [n, k] quantised, with x_scale and w_scale.

    x_scale is [m, ceil(k/128)] in the shape's order, with NaN in the padding of a padded one.
    w_scale is [ceil(n/128), ceil(k/128)].
    """
    import torch

    from tunedgemm.ops.formats.quant import per_1x128_quant, per_block_quant

    generator, target = torch.Generator(device).manual_seed(seed), torch_dtype(shape.dtype)
    x, x_scale = per_1x128_quant(quantised.draw(shape.m, shape.k, BLOCK, generator), target)
    weight, w_scale = per_block_quant(quantised.draw(shape.n, shape.k, BLOCK, generator), target, (BLOCK, BLOCK))
    return x, weight, in_order(x_scale, shape), w_scale


def in_order(x_scale: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Copy scales [m, ceil(k/128)] to a shape's order, with NaN in its padding; row-major ones stay."""
    if scale_order(shape) == ROW:
        return x_scale
    memory = x_scale.new_full((blocks(shape.k), scale_strides(shape)[1]), math.nan)
    return memory[:, : shape.m].t().copy_(x_scale)


def reference(shape: Shape, operands: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Compute [m, n] of a plain weight, and scales of x in any order.

    The result is float64 where that is quick, else float32.
    """
    from tunedgemm.ops.formats.quant import dequant_blocks

    x, weight, x_scale, w_scale = operands
    wide = exact_dtype(shape.m, shape.n, shape.k)
    values = dequant_blocks(x.reshape(shape.m, shape.k), x_scale.reshape(shape.m, blocks(shape.k)), wide)
    return exact_product(values, dequant_blocks(weight, w_scale, wide, (BLOCK, BLOCK)), wide)


def bytes_moved(shape: Shape) -> int:
    """Count each operand and the output once; scales are float32."""
    bits = (shape.m + shape.n) * shape.k * dtype_bits(shape.dtype)
    bits += 32 * (shape.m + blocks(shape.n)) * blocks(shape.k)
    return (bits + shape.m * shape.n * dtype_bits(shape.outdtype)) // 8


def transposed_scale(x_scale: torch.Tensor) -> torch.Tensor:
    """Return 1x128 scales as AITER's blockscale_bpreshuffle takes them, transposed in memory.

    The shape [..., ceil(K/128)] stays.

    Raises:
        OperandError: x_scale is a scalar.
    """
    return _in_order(_rows(x_scale).t()).view(x_scale.shape)


def untransposed_scale(x_scale: torch.Tensor) -> torch.Tensor:
    """Invert `transposed_scale`: row-major scales [..., ceil(K/128)].

    Raises:
        OperandError: x_scale is a scalar, or is not contiguous.
    """
    if not x_scale.is_contiguous():
        raise OperandError(f"a transposed scale is contiguous (got {tuple(x_scale.shape)} with strides {x_scale.stride()})")
    rows = _rows(x_scale)
    return _in_order(rows.view(rows.shape[1], rows.shape[0]).t()).view(x_scale.shape)


def _rows(x_scale: torch.Tensor) -> torch.Tensor:
    if not x_scale.dim():
        raise OperandError("scales have one or more dimensions (got a scalar)")
    return x_scale.detach().reshape(x_scale.shape[:-1].numel(), x_scale.shape[-1])


def _in_order(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix in rows, a copy where needed; `contiguous` keeps any strides of one row or column."""
    import torch

    return matrix.contiguous() if min(matrix.shape) > 1 else matrix.clone(memory_format=torch.contiguous_format)
