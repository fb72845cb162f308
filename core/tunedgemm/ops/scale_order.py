"""Memory order of scales: a field of the shape, absent for the default order. Imports no torch.

x's 1x128 scales are float32 [M, ceil(K/128)]. AITER has them row-major. torch, cuBLASLt, vLLM,
SGLang and DeepGEMM need them M-major: the scales of one K block are contiguous. For TMA, DeepGEMM
pads each such column to a multiple of 16 bytes.

e8m0 scales (one per 32 elements of K) are row-major [rows, K/32] or in AITER's shuffled order. By
default they are shuffled if the weight is; AITER also has plain weights with shuffled scales.

Scales of mxfp8 and nvfp4 are row-major or in tiles. In ``128x4`` both operands have tiles of 128x4
(cuBLASLt, torch's SWIZZLE_32_4_4). In ``8x4`` x has tiles of 8x4 (TensorRT-LLM, FlashInfer).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tunedgemm.errors import OperandError
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch

#: Name of the field in `Shape.extra`, and of the column.
FIELD = "scale_order"
#: Orders with strides (K blocks, 1); (1, M); (1, M rounded up to a multiple of `FLOATS`).
ROW, M_MAJOR, M_MAJOR_PADDED = "row", "m_major", "m_major_padded"
ORDERS = (ROW, M_MAJOR, M_MAJOR_PADDED)
#: Order of e8m0 scales in tiles of 32x8, padded with scale 1 to multiples of `E8M0_TILE`.
SHUFFLED = "aiter32x8"
E8M0_ORDERS = (ROW, SHUFFLED)
E8M0_TILE = (256, 8)
#: Orders of one-byte scales in tiles, padded with zeros; by order the rows of x's tiles.
SWIZZLED, SWIZZLED_8 = "128x4", "8x4"
TILE_ROWS = {SWIZZLED: 128, SWIZZLED_8: 8}
TILE_COLUMNS = 4
MX_ORDERS = (ROW, *TILE_ROWS)
_E8M0_OPS = ("a4w4_blockscale", "a16w4_blockscale")
#: Float32 values per 16 bytes, to which columns are padded.
FLOATS = 4
#: Elements of K per scale of x; also rows and columns per scale of the weight.
BLOCK = 128


def blocks(length: int) -> int:
    """Return the number of blocks in a length; the last may be partial."""
    return -(-length // BLOCK)


def has_e8m0_scales(shape: Shape) -> bool:
    """Check whether a shape has e8m0 scales, one per 32 elements of K."""
    fields = dict(shape.extra)
    return shape.op in _E8M0_OPS or (fields.get("q_type") == "per_1x32" and fields["q_dtype_w"] != "int4")


def usual_order(shape: Shape) -> str:
    """Return the default order of a shape: shuffled for e8m0 scales of shuffled weights."""
    return SHUFFLED if shape.layout != "row" and has_e8m0_scales(shape) else ROW


def scale_order(shape: Shape) -> str:
    """Return the order of x's 1x128 scales, or of all one-byte scales.

    Of orders with equal strides, return the first: one row or one K block is row-major, and an M
    that is a multiple of four needs no padding.
    """
    order = field_of(shape)
    if order not in (M_MAJOR, M_MAJOR_PADDED):
        return order
    if shape.m == 0 or shape.k <= BLOCK or (order == M_MAJOR and shape.m == 1):
        return ROW
    return M_MAJOR if shape.m % FLOATS == 0 else order


def scale_strides(shape: Shape) -> tuple[int, int]:
    """Return the strides of x's scales [M, ceil(K/128)] in floats."""
    if scale_order(shape) == ROW:
        return blocks(shape.k), 1
    return 1, shape.m if field_of(shape) == M_MAJOR else padded(shape.m)


def swizzled_sizes(order: str, rows: int, groups: int) -> tuple[int, int]:
    """Return the padded sizes of scales [rows, groups] in tiles."""
    high = TILE_ROWS[order]
    return -(-rows // high) * high, -(-groups // TILE_COLUMNS) * TILE_COLUMNS


def padded(m: int) -> int:
    """Return the stride, in floats, between padded columns of M scales."""
    return -(-m // FLOATS) * FLOATS


def field_of(shape: Shape) -> str:
    """Return the order field of a shape, or its default."""
    for name, value in shape.extra:
        if name == FIELD:
            return str(value)
    return usual_order(shape)


def with_order(shape: Shape, order: str) -> Shape:
    """Return a shape with another order of its scales."""
    extra = tuple(field for field in shape.extra if field[0] != FIELD)
    return shape.with_extra(extra if order == usual_order(shape) else tuple(sorted((*extra, (FIELD, order)))))


def canonical_order(shape: Shape) -> Shape:
    """Return a shape with the first of the orders with equal strides, like `order_of`.

    A row for any M keeps its order, since the strides differ for most M.
    """
    if not shape.extra or (shape.m == 0 and shape.k > BLOCK):
        return shape
    order = scale_order(shape)
    return shape if order == field_of(shape) else with_order(shape, order)


def of_any_m(shape: Shape) -> Shape:
    """Return the shape with M = 0 of a product's weight, equal for all orders of float32 scales.

    The order of scales in memory changes no bits of a product.
    """
    shape = shape.with_m(0)
    return with_order(shape, ROW) if field_of(shape) in (M_MAJOR, M_MAJOR_PADDED) else shape


def order_of_all(shapes: Iterable[Shape]) -> str:
    """Return the order that scales have at every M, from the canonical shapes of some M."""
    orders = {(field_of(shape), shape.m % FLOATS > 0) for shape in shapes}
    if (M_MAJOR, True) in orders:
        return M_MAJOR
    return M_MAJOR_PADDED if any(order in (M_MAJOR, M_MAJOR_PADDED) for order, _ in orders) else next(iter(orders))[0]


def stated_order(shape: Shape) -> dict[str, str]:
    """Return the keyword argument of `Op.shape_of` for an order other than the default."""
    return {FIELD: order} if (order := field_of(shape)) != usual_order(shape) else {}


def equivalent_orders(shape: Shape) -> tuple[str, ...]:
    """Return the orders whose rows may serve a shape, best first.

    The other M-major order comes second, since both are equal at a padded M, a multiple of four.
    Scales of a single row of x are in every order.
    """
    order = field_of(shape)
    if order == ROW:
        return ORDERS if shape.m == 1 and shape.k > BLOCK else (ROW,)
    return (order, M_MAJOR if order == M_MAJOR_PADDED else M_MAJOR_PADDED, ROW)


def order_of(op: str, x_scale: torch.Tensor, m: int) -> str:
    """Return the order of scales by their strides; they may have x's leading dimensions.

    Raises:
        OperandError: the strides match no order.
    """
    if x_scale.is_contiguous():
        return ROW
    try:
        along_m, along_k = x_scale.view(m, x_scale.shape[-1]).stride()
    except RuntimeError:  # leading dimensions that cannot be flattened
        along_m, along_k = 0, 0
    if along_m == 1 or m == 1:
        if along_k == m:
            return M_MAJOR
        if along_k == padded(m):
            return M_MAJOR_PADDED
    wanted = " or ".join(map(str, dict.fromkeys(((x_scale.shape[-1], 1), (1, m), (1, padded(m))))))
    raise OperandError(
        f"{op}: x_scale: the strides of {m} rows must be {wanted} (got {tuple(x_scale.stride())} for "
        f"{tuple(x_scale.shape)}); pass x_scale.contiguous()"
    )
