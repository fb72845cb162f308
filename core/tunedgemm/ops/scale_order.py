"""Order of scales in memory: a field of the shape unless it is the usual one.

x's 1x128 scales are float32 [M, ceil(K/128)]. AITER has them row-major. torch, cuBLASLt, vLLM,
SGLang and DeepGEMM want them M-major: the scales of one block of K are adjacent. For TMA, DeepGEMM
pads each such column to a multiple of 16 bytes.

e8m0 scales of 32 elements are row-major [rows, K/32] or shuffled as AITER's kernels read them. The
usual order is that of the weight; AITER also has plain weights with shuffled scales. Imports no
torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunedgemm.errors import OperandError
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch

#: Name of the field in `Shape.extra`, and of the column.
FIELD = "scale_order"
#: Strides (blocks of K, 1); (1, M); (1, M rounded up to a multiple of `FLOATS`).
ROW, M_MAJOR, M_MAJOR_PADDED = "row", "m_major", "m_major_padded"
ORDERS = (ROW, M_MAJOR, M_MAJOR_PADDED)
#: e8m0 scales in tiles of 32 rows and 8 columns, padded with 1 to multiples of `E8M0_TILE`.
SHUFFLED = "aiter32x8"
E8M0_ORDERS = (ROW, SHUFFLED)
E8M0_TILE = (256, 8)
_E8M0_OPS = ("a4w4_blockscale", "a16w4_blockscale")
#: Floats of 16 bytes, to whose multiple a padded column is rounded up.
FLOATS = 4
#: Elements of K that share a scale of x; also rows of the weight that share one.
BLOCK = 128


def blocks(length: int) -> int:
    """Count the blocks of a number of elements; the last may be shorter."""
    return -(-length // BLOCK)


def has_e8m0_scales(shape: Shape) -> bool:
    """Tell whether each 32 elements of K share an e8m0 scale."""
    fields = dict(shape.extra)
    return shape.op in _E8M0_OPS or (fields.get("q_type") == "per_1x32" and fields["q_dtype_w"] != "int4")


def usual_order(shape: Shape) -> str:
    """Return the order of a shape without the field: for e8m0 scales that of its weight."""
    return SHUFFLED if shape.layout != "row" and has_e8m0_scales(shape) else ROW


def scale_order(shape: Shape) -> str:
    """Return the order of x's 1x128 scales, or of all e8m0 scales.

    Where two orders are the same strides, return the first of them: one row or one block of K is
    row-major, and no column of a multiple of four rows is padded.
    """
    order = field_of(shape)
    if order == SHUFFLED:
        return order
    if order == ROW or shape.m == 0 or shape.k <= BLOCK or (order == M_MAJOR and shape.m == 1):
        return ROW
    return M_MAJOR if shape.m % FLOATS == 0 else order


def scale_strides(shape: Shape) -> tuple[int, int]:
    """Return the strides of x's scales [M, ceil(K/128)] in floats."""
    if scale_order(shape) == ROW:
        return blocks(shape.k), 1
    return 1, shape.m if field_of(shape) == M_MAJOR else padded(shape.m)


def padded(m: int) -> int:
    """Return the floats from one padded column of M scales to the next."""
    return -(-m // FLOATS) * FLOATS


def field_of(shape: Shape) -> str:
    """Return the field of a shape, or the usual order where it has none."""
    for name, value in shape.extra:
        if name == FIELD:
            return str(value)
    return usual_order(shape)


def with_order(shape: Shape, order: str) -> Shape:
    """Return a shape with another order of its scales."""
    extra = tuple(field for field in shape.extra if field[0] != FIELD)
    return shape.with_extra(extra if order == usual_order(shape) else tuple(sorted((*extra, (FIELD, order)))))


def canonical_order(shape: Shape) -> Shape:
    """Return a shape with the first of the orders that are the same strides, as `order_of` names it.

    A row for any M keeps its order, which most M tell from others.
    """
    if not shape.extra or (shape.m == 0 and shape.k > BLOCK):
        return shape
    order = scale_order(shape)
    return shape if order == field_of(shape) else with_order(shape, order)


def stated_order(shape: Shape) -> dict[str, str]:
    """Return the field as an argument of `Op.shape_of`, where the order is not the usual one."""
    return {FIELD: order} if (order := field_of(shape)) != usual_order(shape) else {}


def equivalent_orders(shape: Shape) -> tuple[str, ...]:
    """Return the orders whose rows may serve a shape, best first.

    The other M-major order comes second: at a padded M, a multiple of four, both are one order.
    The scales of one row of x are in every order.
    """
    order = field_of(shape)
    if order == ROW:
        return ORDERS if shape.m == 1 and shape.k > BLOCK else (ROW,)
    return (order, M_MAJOR if order == M_MAJOR_PADDED else M_MAJOR_PADDED, ROW)


def order_of(op: str, x_scale: torch.Tensor, m: int) -> str:
    """Return the order of the scales of M rows, which may have x's leading dimensions.

    Raises:
        OperandError: the strides are those of no order.
    """
    if x_scale.is_contiguous():
        return ROW
    try:
        along_m, along_k = x_scale.view(m, x_scale.shape[-1]).stride()
    except RuntimeError:  # rows at several distances
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
