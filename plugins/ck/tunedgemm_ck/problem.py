"""Describe the part of a shape that a compiled instance depends on; launches pass M, N and K."""

from __future__ import annotations

from typing import Any

import attrs
from tunedgemm.plugin import Shape
from tunedgemm.tools.launching import scale_order


@attrs.frozen(cache_hash=True)
class Problem:
    """A class of shapes that one shared object serves.

    Attributes:
        op: name of the op.
        gfx: the architecture, as `Device.gfx`.
        dtype: of the activations, as a short text.
        outdtype: of the output.
        bias_dtype: of the bias, "" without one.
        scale: kind of the scales.
        layout: layout of the weight.
        stage: of fmoe, 1 up to the intermediate, 2 from it on; 0 for both, and for other ops.
        act, gated: of fmoe's stage 1, as in `Shape.extra`.
        doweight_stage1: whether stage 1 multiplies by the routing's weights, instead of stage 2.
        q_type, q_dtype: how fmoe's factors are quantised, and their dtype; "" for other ops.
        m_major: whether block scales of x are M-major, each column padded to 16 bytes.
    """

    op: str
    gfx: str
    dtype: str
    outdtype: str
    bias_dtype: str = ""
    scale: str = "none"
    layout: str = "row"
    stage: int = 0
    act: str = ""
    gated: bool = False
    doweight_stage1: bool = False
    q_type: str = ""
    q_dtype: str = ""
    m_major: bool = False

    def fields(self) -> dict[str, Any]:
        """Return all fields for fmoe, and for other ops those that they have.

        Sources begin with this text, which is therefore part of the cache key.
        """
        fields = attrs.asdict(self)
        if not fields["m_major"]:  # keeps the keys of earlier sources
            del fields["m_major"]
        return fields if self.q_type else {name: value for name, value in fields.items() if name in _PLAIN}

    def __str__(self) -> str:
        return f"Problem({', '.join(f'{name}={value!r}' for name, value in self.fields().items())})"


_PLAIN = ("op", "gfx", "dtype", "outdtype", "bias_dtype", "scale", "layout", "m_major")


def problem_of(shape: Shape, gfx: str) -> Problem:
    """Return the class of a shape; for fmoe that of both stages, see `stages.split_stages`."""
    m_major = scale_order(shape).startswith("m_major")
    plain = Problem(shape.op, gfx, shape.dtype, shape.outdtype, shape.bias_dtype, shape.scale, shape.layout, m_major=m_major)
    if shape.op != "fmoe":
        return plain
    words = {name: str(shape[name]) for name in ("act", "q_type")}
    return attrs.evolve(
        plain, **words, gated=bool(shape["g1u1"]), doweight_stage1=bool(shape["doweight_stage1"]), q_dtype=str(shape["q_dtype_w"])
    )


def batches_of(shape: Shape) -> int:
    """Return the number of products of a batch; 1 for an op without batches."""
    return int(shape["B"]) if shape.op.startswith("batched_") else 1
