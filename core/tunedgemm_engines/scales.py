"""Pass an engine's scales to the op in the form that the op takes.

Engines pass one scale of a tensor where their kernels broadcast it; `one_a_row` repeats it. Scales
of blocks stay in the order that the engine's kernels read. Only a row whose kernel does not read it
makes them be copied, and only for the M that it serves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tunedgemm import dispatcher
from tunedgemm.integrations import OperandError, field_of, order_of, with_order
from tunedgemm.plugin import Device, Shape, device_of
from tunedgemm.tools.launching import scale_order

#: Orders of scales, by their words in tables.
ROW, M_MAJOR = "row", "m_major"
#: Rows of x that tell all orders apart: more than one, and no multiple of four.
TELLING_ROWS = 5


def one_a_row(scale: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the scales [rows, 1] of an operand, which an engine gives by row or as one of the tensor.

    Their number tells the two apart, not what the engine announces: it may vary with device and M.
    One scale is repeated in each call, on the GPU and in graphs, so a new value in place counts.
    """
    return scale.reshape(1, 1).expand(rows, 1).contiguous() if scale.numel() == 1 else scale.reshape(rows, 1)


def is_one_a_row(scale: Any, rows: int) -> bool:
    """Return whether `one_a_row` takes a scale of so many rows."""
    return isinstance(scale, torch.Tensor) and scale.dtype is torch.float32 and scale.numel() in (1, rows)


def known_order(x_scale: Any) -> str:
    """Return the order of scales [M, blocks] of more rows than one; row-major where it is unknown."""
    if not isinstance(x_scale, torch.Tensor) or x_scale.dim() != 2:
        return ROW
    try:
        return order_of("", x_scale, x_scale.shape[0])
    except OperandError:
        return ROW


def order_made(scales_of: Callable[[torch.Tensor], Any], k: int, dtype: torch.dtype, device: torch.device) -> str:
    """Return the order of the scales that an engine makes of x [M, k]; row-major where it cannot yet."""
    try:
        return known_order(scales_of(torch.randn(TELLING_ROWS, k, dtype=dtype, device=device)))
    except (RuntimeError, TypeError, ValueError, AssertionError):
        return ROW


def at_m(shape: Shape, m: int) -> Shape:
    """Return a route's shape at another M, with the order that its scales have there."""
    other = shape.with_m(m)
    return other if field_of(other) == ROW else with_order(other, scale_order(other))


def explain_row(op_dispatcher: Any, shape: Shape, device: Device) -> Any:
    """Explain what serves a shape; where no row does, what serves it with row-major scales, if a row does."""
    explanation = op_dispatcher.explain(shape, device)
    if is_served(explanation) or field_of(shape) == ROW:
        return explanation
    copied = op_dispatcher.explain(with_order(shape, ROW), device)
    return copied if is_served(copied) else explanation


def is_served(explanation: Any) -> bool:
    """Return whether a row serves, with or without its bias."""
    return bool(explanation.offer.origin in ("table", "unbiased") and not explanation.refused)


def scales_for_rows(shape: Shape) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that prepares an engine's scales of x [M, blocks] for the op.

    It returns them unchanged in an order that the op knows. Others become row-major, as do all at
    an M whose row does not read their order.

    Args:
        shape: the route's, in the order that the engine has.
    """
    copied: dict[tuple[int, tuple[int, ...]], bool] = {}

    def prepared(x_scale: torch.Tensor) -> torch.Tensor:
        if x_scale.is_contiguous():
            return x_scale
        key = x_scale.shape[0], x_scale.stride()
        copies = copied.get(key)
        if copies is None:
            copies = copied[key] = known_order(x_scale) == ROW or _needs_copy(shape, key[0], device_of(x_scale.get_device()))
        return x_scale.contiguous() if copies else x_scale

    return prepared


def _needs_copy(shape: Shape, m: int, device: Device) -> bool:
    """Return whether the row that serves M rows is one for row-major scales only."""
    op_dispatcher = dispatcher(shape.op)
    if op_dispatcher.settings.capture or op_dispatcher.on_miss is not None:
        return False
    ordered = at_m(with_order(shape, M_MAJOR) if field_of(shape) == ROW else shape, m)
    return bool(explain_row(op_dispatcher, ordered, device).shape != ordered)
