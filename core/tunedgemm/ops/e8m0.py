"""Find the order of a call's e8m0 scales: as stated, by their types, or by their sizes.

Each 32 elements of K share a scale. Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from tunedgemm.errors import OperandError
from tunedgemm.ops.layout import noted_order
from tunedgemm.ops.scale_order import E8M0_ORDERS, E8M0_TILE, FIELD, ROW, SHUFFLED

if TYPE_CHECKING:
    import torch


def shuffled_sizes(rows: int, groups: int) -> tuple[int, int]:
    """Return the sizes of shuffled e8m0 scales of [rows, groups]."""
    high, wide = E8M0_TILE
    return -(-rows // high) * high, -(-groups // wide) * wide


@attrs.frozen
class E8m0Scale:
    """An e8m0 scale of a call.

    Attributes:
        name: of the operand.
        scale: the tensor.
        row, shuffled: the sizes that it may have in each order.
    """

    name: str
    scale: torch.Tensor
    row: tuple[tuple[int, ...], ...]
    shuffled: tuple[tuple[int, ...], ...]

    def order(self, op: str, layout: str, stated: str) -> str:
        """Return the order: as stated, as the type says, or the only one that the sizes fit.

        "" where they fit none, or no scale is there. Where they fit both, scales of a plain weight
        are row-major.

        Raises:
            OperandError: the type contradicts; or both orders fit scales that lost their type, or
                those of a shuffled weight.
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
        if noted_order(self.scale):
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
    """Return the order of all e8m0 scales of a call; "" where their sizes tell none.

    Args:
        layout: of the weight.
        stated: the caller's word for it, None for none.

    Raises:
        OperandError: an unknown word, two orders, or none that is certain.
    """
    if stated and stated not in E8M0_ORDERS:
        raise OperandError(f"{op}: scale_order must be {' or '.join(E8M0_ORDERS)} (got {stated!r})")
    orders = {each.name: order for each in scales if (order := each.order(op, layout, stated or ""))}
    if len(set(orders.values())) > 1:
        found = ", ".join(f"{name} {order}" for name, order in orders.items())
        remedy = f"pass shuffle_scale(s) of row-major ones, and as_shuffled_scale(s) or scale_order={SHUFFLED!r} for shuffled bytes"
        raise OperandError(f"{op}: all scales must have one order (got {found}); {remedy}")
    return next(iter(orders.values()), "")
