"""Infer the memory order of a call's e8m0 scales (one per 32 elements of K). Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from tunedgemm.errors import OperandError
from tunedgemm.ops.layout import CHECKPOINT, REPACKED, noted_order
from tunedgemm.ops.scale_order import E8M0_ORDERS, E8M0_TILE, FIELD, ROW, SHUFFLED

if TYPE_CHECKING:
    import torch


def shuffled_sizes(rows: int, groups: int) -> tuple[int, int]:
    """Return the padded sizes of e8m0 scales [rows, groups] in shuffled order."""
    high, wide = E8M0_TILE
    return -(-rows // high) * high, -(-groups // wide) * wide


def check_not_shuffled(op: str, name: str, scale: torch.Tensor, wanted: str, rows: int, groups: int) -> None:
    """Check that scales [rows, groups] are not in AITER's order, by their type or their memory.

    Raises:
        OperandError: they are; the message says that they must be *wanted*.
    """
    if shuffled := getattr(scale, FIELD, "") or _noted(scale):
        raise OperandError(f"{op}: {name} must be {wanted} (got {shuffled}); pass unshuffle_scale({name}, {rows}, {groups})")


def _noted(scale: torch.Tensor) -> str:
    """Return the noted order of tiles; those of engines are checked apart."""
    return "" if (order := noted_order(scale)) in (CHECKPOINT, *REPACKED) else order


@attrs.frozen
class E8m0Scale:
    """An e8m0 scale operand of a call.

    Attributes:
        name: name of the operand.
        scale: the tensor; None if absent.
        row, shuffled: the sizes that are valid in each order.
    """

    name: str
    scale: torch.Tensor
    row: tuple[tuple[int, ...], ...]
    shuffled: tuple[tuple[int, ...], ...]

    def order(self, op: str, layout: str, stated: str) -> str:
        """Return the order: as stated, by the type, or the only one with these sizes.

        Returns "" if no order has these sizes or the scale is absent. If both have them, scales of
        a plain weight are row-major.

        Raises:
            OperandError: the type contradicts *stated*, or the order is ambiguous.
        """
        by_type = getattr(self.scale, FIELD, "")
        if stated and by_type and stated != by_type:
            raise OperandError(f"{op}: {self.name} has the order {by_type} by its type (got scale_order={stated!r}); leave scale_order out")
        if stated or by_type:
            return stated or by_type
        sizes = tuple(self.scale.shape)
        fits = [order for order, allowed in ((ROW, self.row), (SHUFFLED, self.shuffled)) if sizes in allowed]
        if len(fits) < 2 or not self.scale.numel():
            return fits[0] if len(fits) == 1 else ""
        if _noted(self.scale):
            raise OperandError(
                f"{op}: {self.name} has shuffled bytes and lost the type, as by parameter.data = shuffle_scale(s); assign "
                f"torch.nn.Parameter(shuffle_scale(s), requires_grad=False), or pass as_shuffled_scale({self.name})"
            )
        if layout == "row":
            return ROW
        raise OperandError(
            f"{op}: {self.name}: sizes {sizes} fit row-major and shuffled scales; pass as_shuffled_scale({self.name}) if its bytes are "
            f"shuffled, else shuffle_scale({self.name}) or scale_order={ROW!r}"
        )


def e8m0_order(op: str, scales: tuple[E8m0Scale, ...], layout: str, stated: str | None) -> str:
    """Return the common order of a call's e8m0 scales; "" if no order has their sizes.

    Args:
        layout: layout of the weight.
        stated: the caller's ``scale_order``, or None.

        Raises:
        OperandError: *stated* is unknown, or the orders of the scales differ or are ambiguous.
    """
    if stated and stated not in E8M0_ORDERS:
        raise OperandError(f"{op}: scale_order must be {' or '.join(E8M0_ORDERS)} (got {stated!r})")
    orders = {each.name: order for each in scales if (order := each.order(op, layout, stated or ""))}
    if len(set(orders.values())) > 1:
        found = ", ".join(f"{name} {order}" for name, order in orders.items())
        remedy = f"pass shuffle_scale(s) of row-major ones, and as_shuffled_scale(s) or scale_order={SHUFFLED!r} for shuffled bytes"
        raise OperandError(f"{op}: all scales must have one order (got {found}); {remedy}")
    return next(iter(orders.values()), "")
