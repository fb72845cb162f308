"""Problem: what of a shape a compiled instance depends on; M, N and K are told to it at each launch."""

from __future__ import annotations

import attrs
from tunedgemm.plugin import Shape


@attrs.frozen(cache_hash=True)
class Problem:
    """A class of shapes that one shared object serves.

    Attributes:
        op: name of the op.
        gfx: the architecture, as `Device.gfx`.
        dtype, outdtype, bias_dtype: short texts, the first of the activations; bias_dtype is "" without a bias.
        scale: kind of the scales.
        layout: how the weight lies.
    """

    op: str
    gfx: str
    dtype: str
    outdtype: str
    bias_dtype: str = ""
    scale: str = "none"
    layout: str = "row"


def problem_of(shape: Shape, gfx: str) -> Problem:
    """The class that a shape belongs to."""
    return Problem(shape.op, gfx, shape.dtype, shape.outdtype, shape.bias_dtype, shape.scale, shape.layout)


def batches_of(shape: Shape) -> int:
    """Products of a batch; 1 for an op that has one."""
    return int(shape["B"]) if shape.op.startswith("batched_") else 1
