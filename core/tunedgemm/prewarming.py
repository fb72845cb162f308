"""What is bound before it is called: so that graphs may be captured, and first calls are quick."""

from __future__ import annotations

from collections.abc import Iterable

from tunedgemm.dispatch import tgemm
from tunedgemm.ops import ops
from tunedgemm.shape import Shape


def prewarm(shapes: Iterable[Shape] | None = None) -> int:
    """Bind and run shapes once, so that graphs may be captured afterwards; returns how many.

    Args:
        shapes: of any ops; without them every tuned shape of the present device, of every op.
    """
    if shapes is None:
        return sum(tgemm.of(op).prewarm() for op in ops())
    by_op: dict[str, list[Shape]] = {}
    for shape in shapes:
        by_op.setdefault(shape.op, []).append(shape)
    return sum(tgemm.of(op).prewarm(listed) for op, listed in by_op.items())
