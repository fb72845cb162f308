"""Order of x's 1x128 scales in memory: a field of the shape unless the scales are row-major.

The scales are float32 [M, ceil(K/128)]. AITER has them row-major. torch, cuBLASLt, vLLM, SGLang
and DeepGEMM want them M-major: the scales of one block of K are adjacent. For TMA, DeepGEMM pads
each such column to a multiple of 16 bytes. Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from tunedgemm.errors import OperandError
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch

#: Name of the field in `Shape.extra`, and of the column.
FIELD = "scale_order"
#: Strides (blocks of K, 1); (1, M); (1, M rounded up to a multiple of `FLOATS`).
ROW, M_MAJOR, M_MAJOR_PADDED = "row", "m_major", "m_major_padded"
ORDERS = (ROW, M_MAJOR, M_MAJOR_PADDED)
#: Floats of 16 bytes, to whose multiple a padded column is rounded up.
FLOATS = 4
#: Elements of K that share a scale of x; also rows of the weight that share one.
BLOCK = 128


def blocks(length: int) -> int:
    """Count the blocks of a number of elements; the last may be shorter."""
    return -(-length // BLOCK)


def scale_order(shape: Shape) -> str:
    """Return the order of x's scales: ``row``, ``m_major`` or ``m_major_padded``.

    Where two orders are the same strides, return the first of them: one row or one block of K is
    row-major, and no column of a multiple of four rows is padded.
    """
    order = field_of(shape)
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
    """Return the field of a shape, ``row`` where it has none."""
    for name, value in shape.extra:
        if name == FIELD:
            return str(value)
    return ROW


def with_order(shape: Shape, order: str) -> Shape:
    """Return a shape with another order of x's scales."""
    extra = {name: value for name, value in shape.extra if name != FIELD}
    return attrs.evolve(shape, extra=extra if order == ROW else {**extra, FIELD: order})  # type: ignore[arg-type]


def equivalent_orders(shape: Shape) -> tuple[str, ...]:
    """Return the orders whose rows may serve a shape, best first.

    The other M-major order comes second: at a padded M, a multiple of four, both are one order.
    """
    order = field_of(shape)
    if order == ROW:
        return (ROW,)
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
