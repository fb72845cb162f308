"""Shared by a4w4_blockscale and a16w4_blockscale, whose weight is in mxfp4.

A byte holds two e2m1 values, the even element in the low nibble, so a packed operand is [..., K/2].
Each 32 elements of K have an e8m0 scale: row-major [rows, K/32], or in AITER's shuffled order
(`tunedgemm.ops.formats.scales.shuffle_scale`) [ceil256(rows), ceil8(K/32)]. By default scales are
shuffled if the weight is, but any combination is valid (`tunedgemm.ops.scale_order`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunedgemm.errors import OperandError
from tunedgemm.ops import quantised
from tunedgemm.ops.domain import Domain
from tunedgemm.ops.e8m0 import E8m0Scale, e8m0_order, shuffled_sizes
from tunedgemm.ops.layout import layout_of
from tunedgemm.ops.scale_order import E8M0_ORDERS, FIELD, ROW, field_of, usual_order, with_order
from tunedgemm.ops.schema import BIAS, Word
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch

FP4 = ("fp4x2", "uint8")
_E8M0 = ("e8m0", "uint8")
#: Layout of shuffled weights for AITER's kernels.
SHUFFLED = "aiter16x16"
#: Elements of K that share a scale.
GROUP = 32


def domain(dtypes: tuple[str, ...]) -> Domain:
    """Return the domain of an op with a weight in mxfp4."""
    biases = quantised.BIAS_DTYPES
    return Domain(dtypes, quantised.OUTDTYPES, biases, ("block",), "any", FP4[0], optional=(FIELD,), further=_scales_problem)


def _scales_problem(shape: Shape) -> str:
    if shape.k % GROUP:
        return f"K must be a multiple of {GROUP}, which share a scale (got K={shape.k})"
    order = field_of(shape)
    return "" if order in E8M0_ORDERS else f"{FIELD} must be {' or '.join(E8M0_ORDERS)} (got {order})"


#: Our columns after the layout; the default scale order follows the layout.
OWN = (quantised.OUTDTYPE, BIAS, Word(FIELD, FIELD, usual_order, spare=True, allowed=E8M0_ORDERS))


def shape_of(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    k: int,
    dtypes: tuple[str, str],
    stated: str | None,
    **scales: torch.Tensor,
) -> Shape:
    """Return a call's shape with the order of its e8m0 scales.

    Args:
        op, x, weight, bias: op and checked operands of the call.
        k: K in elements.
        dtypes: short dtypes of the activations and the output.
        stated: the caller's ``scale_order``, or None.
        scales: x_scale and w_scale, or only w_scale.

    Raises:
        OperandError: a bias or scale has a wrong size, dtype or device, or the order is ambiguous.
    """
    layout, n = layout_of(op, weight), weight.shape[0]
    if k % GROUP:
        raise OperandError(f"{op}: K must be a multiple of {GROUP}, which share a scale (got K={k}); pad x and the weight with zeros")
    bias_dtype = quantised.bias_dtype_of(op, bias, n, x.device)
    epilogue, device = "bias" if bias_dtype else "none", x.device
    shape = Shape(op, quantised.rows_of(x), n, k, *dtypes, epilogue, bias_dtype, scale="block", layout=layout)
    groups, checked = shape.k // GROUP, []
    for name, scale in scales.items():
        rows = shape.m if name == "x_scale" else shape.n
        leading = ((*x.shape[:-1], groups),) if name == "x_scale" else ()
        checked.append(E8m0Scale(name, scale, ((rows, groups), *leading), (shuffled_sizes(rows, groups),)))
    order = e8m0_order(shape.op, tuple(checked), shape.layout, stated) or usual_order(shape)
    for each in checked:
        try:
            quantised.check_scale(shape.op, each.name, each.scale, each.row if order == ROW else each.shuffled, _E8M0, device)
        except OperandError as error:
            names = ("shuffled scales (shuffle_scale(s))", each.shuffled) if order == ROW else ("row-major scales", each.row)
            raise OperandError(f"{error}; {names[0]} are {list(names[1][0])}") from None
        if order != ROW and not each.scale.is_contiguous():
            raise OperandError(f"{shape.op}: shuffled scales must be contiguous (got {each.name} with strides {each.scale.stride()})")
    return with_order(shape, order)


def check_preshuffle(op: str, weight: torch.Tensor, bpreshuffle: bool | None, name: str) -> None:
    """Check that the type of a weight agrees with ``bpreshuffle``; *name* is its argument.

    Raises:
        OperandError: they disagree.
    """
    layout = getattr(weight, "layout_name", "row")
    if (layout != "row") is not bool(bpreshuffle):
        raise OperandError(
            f"{op}: bpreshuffle={bpreshuffle}, but the weight has layout {layout}; pass "
            f"shuffle_weight({name}), as_shuffled({name}) if its bytes are shuffled already, or bpreshuffle=False"
        )
