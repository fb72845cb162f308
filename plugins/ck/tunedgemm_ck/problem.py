"""Problem: what of a shape a compiled instance depends on; M, N and K are told to it at each launch."""

from __future__ import annotations

from typing import Any

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
        stage: of fmoe, 1 up to the intermediate, 2 from there on; 0 for both, and for other ops.
        act, gated: of fmoe's stage 1, the word of `Shape.extra`.
        doweight_stage1: whether stage 1 multiplies the weights of the routing in, instead of stage 2.
        q_type, q_dtype: how fmoe's factors are quantised, and to what; "" for other ops.
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

    def fields(self) -> dict[str, Any]:
        """All fields of fmoe, and of other ops those that they have: sources begin with this text, and objects are found by it."""
        fields = attrs.asdict(self)
        return fields if self.q_type else {name: fields[name] for name in _PLAIN}

    def __str__(self) -> str:
        return f"Problem({', '.join(f'{name}={value!r}' for name, value in self.fields().items())})"


_PLAIN = ("op", "gfx", "dtype", "outdtype", "bias_dtype", "scale", "layout")


def problem_of(shape: Shape, gfx: str) -> Problem:
    """The class that a shape belongs to; of fmoe that of both stages, which `tunedgemm_ck.stages.parts` takes apart."""
    plain = Problem(shape.op, gfx, shape.dtype, shape.outdtype, shape.bias_dtype, shape.scale, shape.layout)
    if shape.op != "fmoe":
        return plain
    words = {name: str(shape[name]) for name in ("act", "q_type")}
    return attrs.evolve(
        plain, **words, gated=bool(shape["g1u1"]), doweight_stage1=bool(shape["doweight_stage1"]), q_dtype=str(shape["q_dtype_w"])
    )


def batches_of(shape: Shape) -> int:
    """Products of a batch; 1 for an op that has one."""
    return int(shape["B"]) if shape.op.startswith("batched_") else 1
