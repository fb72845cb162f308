"""Convert an engine's scales to the form that the op takes.

Engines pass a per-tensor scale where their kernels broadcast it; `one_a_row` expands it. Block
scales keep the engine's order, and are copied only at an M whose row's kernel cannot read it.
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
ROW, M_MAJOR, M_MAJOR_PADDED = "row", "m_major", "m_major_padded"
#: M at which all orders have different strides: more than one, and not a multiple of four.
TELLING_ROWS = 5


def one_a_row(scale: torch.Tensor, rows: int) -> torch.Tensor:
    """Return row-wise scales [rows, 1] of an engine's row-wise or per-tensor scale.

    Its size decides, not what the engine declares, which may vary with device and M. A per-tensor
    scale is expanded in each call, also in graphs, so that in-place updates take effect.
    """
    return scale.reshape(1, 1).expand(rows, 1).contiguous() if scale.numel() == 1 else scale.reshape(rows, 1)


def is_one_a_row(scale: Any, rows: int) -> bool:
    """Check whether `one_a_row` accepts a scale for this number of rows."""
    return isinstance(scale, torch.Tensor) and scale.dtype is torch.float32 and scale.numel() in (1, rows)


def known_order(x_scale: Any) -> str:
    """Return the order of scales [M, blocks], M > 1; row-major if unknown."""
    if not isinstance(x_scale, torch.Tensor) or x_scale.dim() != 2:
        return ROW
    try:
        return order_of("", x_scale, x_scale.shape[0])
    except OperandError:
        return ROW


def order_made(scales_of: Callable[[torch.Tensor], Any], k: int, dtype: torch.dtype, device: torch.device) -> str:
    """Return the order of the scales that an engine makes for x [M, k]; row-major if that fails."""
    try:
        return known_order(scales_of(torch.randn(TELLING_ROWS, k, dtype=dtype, device=device)))
    except (RuntimeError, TypeError, ValueError, AssertionError):
        return ROW


def at_m(shape: Shape, m: int) -> Shape:
    """Return a route's shape at another M, with its scale order there."""
    other = shape.with_m(m)
    return other if field_of(other) == ROW else with_order(other, scale_order(other))


def explain_row(op_dispatcher: Any, shape: Shape, device: Device) -> Any:
    """Explain a shape, or the same with row-major scales if only that has a row.

    A choice that was bound for calls is not made again.
    """
    explanation = _explained(op_dispatcher, shape, device)
    if is_served(explanation) or field_of(shape) == ROW or not op_dispatcher.table.has_row(copied := with_order(shape, ROW), device):
        return explanation
    of_copies = _explained(op_dispatcher, copied, device)
    return of_copies if is_served(of_copies) else explanation


def _explained(op_dispatcher: Any, shape: Shape, device: Device) -> Any:
    bound = op_dispatcher.is_bound(shape, device) and not op_dispatcher.cache.outdated
    return op_dispatcher.bound(shape, device) if bound else op_dispatcher.explain(shape, device)


def is_served(explanation: Any) -> bool:
    """Check whether a row serves, with or without its bias."""
    return bool(explanation.offer.origin in ("table", "unbiased") and not explanation.refused)


def scales_for_rows(shape: Shape) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that prepares an engine's scales of x [M, blocks] for the op.

    Scales in an order that the op supports are unchanged. Others become row-major, as do all at an
    M whose row does not read their order.

    Args:
        shape: the route's shape, with the engine's scale order.
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
    """Check whether the row that serves M needs row-major scales."""
    op_dispatcher = dispatcher(shape.op)
    if op_dispatcher.settings.needs_calls(shape.op):
        return False
    ordered = at_m(with_order(shape, M_MAJOR) if field_of(shape) == ROW else shape, m)
    if not op_dispatcher.table.has_row(with_order(ordered, ROW), device):  # each M of prefill comes here
        return False
    return bool(explain_row(op_dispatcher, ordered, device).shape != ordered)
