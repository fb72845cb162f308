"""Domain of fmoe: the shapes that its calls can have. Imports no torch."""

from __future__ import annotations

from tunedgemm.ops import moe_words
from tunedgemm.ops.domain import Domain
from tunedgemm.ops.layout import misfit
from tunedgemm.ops.moe_options import GATE_MODE, OPTIONS, options_of
from tunedgemm.ops.moe_words import DTYPES, EXPERT_PARALLEL
from tunedgemm.ops.scale_order import E8M0_ORDERS, FIELD, ROW, field_of, has_e8m0_scales
from tunedgemm.shape import Shape

#: Default layout of AITER's rows: its models shuffle expert weights.
LAYOUT = "aiter16x16"


def _misfit(shape: Shape, layout: str) -> str:
    """Return why experts of these sizes cannot have a layout, or ""."""
    q_dtype_w = str(shape["q_dtype_w"])
    first = misfit(layout, (shape.k * (2 if shape["g1u1"] else 1), shape.n), q_dtype_w, ("the rows of w1", "model_dim"))
    return first or misfit(layout, (shape.n, shape.k), q_dtype_w, ("model_dim", "inter_dim"))


def usual_layout(shape: Shape) -> str:
    """Return the default layout of AITER's rows: shuffled, or plain if the sizes do not divide."""
    return "row" if _misfit(shape, LAYOUT) else LAYOUT


def _problem(shape: Shape) -> str:
    """Return why a shape with valid fields is impossible, or ""."""
    if fault := moe_words.problem(shape):
        return fault
    if shape["q_dtype_w"] == "int4" and shape.layout != LAYOUT:
        return f"layout: int4 weights are read in {LAYOUT} (got {shape.layout})"
    if options_of(shape).quantised and shape["q_dtype_a"] in DTYPES:
        return f"options: quantised hidden states have a q_dtype_a of 8 or 4 bits (got {shape['q_dtype_a']})"
    if (order := field_of(shape)) not in (E8M0_ORDERS if has_e8m0_scales(shape) else (ROW,)):
        return f"{FIELD} must be that of the scales of {shape['q_type']} (got {order})"
    return _misfit(shape, shape.layout)


#: Required fields of `Shape.extra`.
_FIELDS = ("act", "doweight_stage1", "expert", "g1u1", "q_dtype_a", "q_dtype_w", "q_type", "topk")
DOMAIN = Domain(DTYPES, DTYPES, layouts="own", extra=_FIELDS, optional=(EXPERT_PARALLEL, FIELD, GATE_MODE, OPTIONS), further=_problem)
