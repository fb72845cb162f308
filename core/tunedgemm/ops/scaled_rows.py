"""Share code of a8w8 and a8w8_bpreshuffle: ``out = (x @ weight.T) * x_scale * w_scale (+ bias)``.

Scales are by row or by tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs

from tunedgemm.dtype import dtype_bits, torch_dtype
from tunedgemm.errors import OperandError
from tunedgemm.ops import quantised
from tunedgemm.ops.domain import Domain
from tunedgemm.ops.product import exact_dtype, exact_product
from tunedgemm.ops.schema import BIAS, MNK, Column, Dtype, Schema, Word
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch

DTYPES = ("int8", *quantised.FP8)
OPERANDS = ("x", "weight", "x_scale", "w_scale", "bias?")
WEIGHTS = (1, 3, 4)

#: Kinds of scales; the first is that of AITER's rows.
_KINDS = ("row", "tensor")
_FLOAT32 = ("fp32",)
#: Columns of K whose size `make_inputs` varies together.
_GROUP = 128


def kind_of(m: int, n: int, kind: str) -> str:
    """Return the kind of scales; one value for one row is AITER's kind, whatever it is called."""
    return _KINDS[0] if m == n == 1 else kind


def canonical(shape: Shape) -> Shape:
    """Return a shape with the kind of scales that calls of its sizes have."""
    return shape if shape.scale == (kind := kind_of(shape.m, shape.n, shape.scale)) else attrs.evolve(shape, scale=kind)


def domain(layouts: str) -> Domain:
    """Return the domain of an op with plain weights, ``row``, or ``shuffled`` ones."""
    return Domain(DTYPES, quantised.OUTDTYPES, quantised.BIAS_DTYPES, _KINDS, layouts)


def schema(op: str, default: str, layouts: tuple[Column, ...] = ()) -> Schema:
    """Return the columns of *op*, whose rows have the dtype *default* where they name none.

    *layouts* is the column of shuffled weights' layout; without one, weights are plain.
    """
    return Schema(
        {"op": op},
        key=(*MNK, Dtype("q_dtype_w", "dtype", default, allowed=DTYPES)),
        own=(*layouts, Word("scale", "scale", _KINDS[0], allowed=_KINDS), quantised.OUTDTYPE, BIAS),
    )


def shaper(op: str, layout_of: Callable[[torch.Tensor], str]) -> Callable[..., Shape]:
    """Make `Op.shape_of`.

    *layout_of* gives the layout of a weight that the op takes, and raises OperandError for another.
    """

    def shape_of(
        x: torch.Tensor,
        weight: torch.Tensor,
        x_scale: torch.Tensor,
        w_scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        otype: torch.dtype | None = None,
    ) -> Shape:
        """Return the shape of a call; raises OperandError for operands that do not fit each other."""
        quantised.check_tensors(op, x=x, weight=weight, x_scale=x_scale, w_scale=w_scale)
        layout = layout_of(weight)
        quantised.check_matrices(op, x, weight)
        dtype = quantised.check_dtypes(op, x, weight, DTYPES)
        m, n = quantised.rows_of(x), weight.shape[0]
        bias_dtype = quantised.bias_dtype_of(op, bias, n, x.device)
        return Shape(
            op=op,
            m=m,
            n=n,
            k=x.shape[-1],
            dtype=dtype,
            outdtype=quantised.outdtype_of(op, otype),
            epilogue="bias" if bias_dtype else "none",
            bias_dtype=bias_dtype,
            scale=_kind(op, x, n, x_scale, w_scale),
            layout=layout,
        )

    return shape_of


def _kind(op: str, x: torch.Tensor, n: int, x_scale: torch.Tensor, w_scale: torch.Tensor) -> str:
    """Return ``tensor`` for one value each, ``row`` for one value a row, also where there is one row.

    Raises OperandError for any other scales.
    """
    m = quantised.rows_of(x)
    for name, scale in (("x_scale", x_scale), ("w_scale", w_scale)):
        if scale.device != x.device:
            raise OperandError(f"{op}: {name} must be on {x.device}, as x (got {quantised.describe(scale)})")
    ones = [scale.numel() == 1 for scale in (x_scale, w_scale)]
    if all(ones):
        kind = kind_of(m, n, "tensor")
    elif ones == [True, False] and m != 1:
        raise OperandError(
            f"{op}: x_scale is of the whole tensor and w_scale by row (got {quantised.describe(x_scale)}, {quantised.describe(w_scale)}); "
            f"pass x_scale.reshape(1, 1).expand({m}, 1).contiguous()"
        )
    elif ones == [False, True] and n != 1:
        raise OperandError(
            f"{op}: x_scale is by row and w_scale of the whole tensor (got {quantised.describe(x_scale)}, {quantised.describe(w_scale)}); "
            f"pass w_scale.reshape(1, 1).expand({n}, 1).contiguous()"
        )
    else:
        kind = "row"
        quantised.check_scale(op, "x_scale", x_scale, ((m,), (m, 1), (*x.shape[:-1], 1)), _FLOAT32, x.device)
        quantised.check_scale(op, "w_scale", w_scale, ((n,), (n, 1), (1, n)), _FLOAT32, x.device)
    for name, scale in (("x_scale", x_scale), ("w_scale", w_scale)):
        quantised.check_dtype(op, name, scale, _FLOAT32)
    return kind


def make_inputs(shape: Shape, device: torch.device, seed: int) -> tuple[Any, ...]:
    """Draw normal x [m, k] and weight [n, k], quantised, their scales, and bias [n] if asked.

    Scales are [m, 1] and [n, 1], or [1] each.
    """
    import torch

    from tunedgemm.ops.formats.quant import per_tensor_quant, pertoken_quant
    from tunedgemm.ops.formats.shuffle import shuffle_weight

    generator = torch.Generator(device).manual_seed(seed)
    quantise = per_tensor_quant if shape.scale == "tensor" else pertoken_quant
    target = torch_dtype(shape.dtype)
    x, x_scale = quantise(quantised.draw(shape.m, shape.k, _GROUP, generator), quant_dtype=target)
    weight, w_scale = quantise(quantised.draw(shape.n, shape.k, _GROUP, generator), quant_dtype=target)
    weight = weight if shape.layout == "row" else shuffle_weight(weight, shape.layout)
    return x, weight, x_scale, w_scale, *quantised.draw_bias(shape, generator)


def reference(shape: Shape, operands: tuple[Any, ...]) -> torch.Tensor:
    """Compute [m, n] on the operands' device, rounded to float64 where quick, else to float32."""
    from tunedgemm.ops.formats.shuffle import unshuffled

    x, weight, x_scale, w_scale, bias = (*operands, None)[:5]
    wide = exact_dtype(shape.m, shape.n, shape.k)
    out = exact_product(x.reshape(shape.m, shape.k), unshuffled(weight), wide)
    out = out.mul_(x_scale.to(wide).reshape(-1, 1)).mul_(w_scale.to(wide).reshape(1, -1))
    return out if bias is None else out.add_(bias.to(wide).reshape(1, -1))


def first_rows(shape: Shape, operands: tuple[Any, ...], m: int) -> tuple[Any, ...]:
    """Cut the first rows of x and, where they go by row, its scales."""
    x, weight, x_scale, *rest = operands
    x_scale = x_scale.reshape(-1, 1)[:m].contiguous() if shape.scale == "row" else x_scale
    return (x.reshape(shape.m, shape.k)[:m].contiguous(), weight, x_scale, *rest)


def bytes_moved(shape: Shape) -> int:
    """Count each operand and the output once; scales are float32."""
    bits = (shape.m + shape.n) * shape.k * dtype_bits(shape.dtype)
    bits += 32 * (2 if shape.scale == "tensor" else shape.m + shape.n)
    bits += shape.n * dtype_bits(shape.bias_dtype) if shape.bias else 0
    return (bits + shape.m * shape.n * dtype_bits(shape.outdtype)) // 8
