"""Products of both sides in the place of a16wn's: x is quantised by the rule of the weight's format.

Their numbers differ from those of 16-bit activations, so a solution of the built-in backend has
them only where a process allows it. Its kernel name is `PREFIX` and the other op. Accuracy is then
judged by the other op's tolerance, against its reference of the quantised x.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from tunedgemm.dtype import torch_dtype
from tunedgemm.libtypes import BUILTIN
from tunedgemm.ops import op_named
from tunedgemm.ops.op import Op
from tunedgemm.ops.weight_formats import format_of
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution

if TYPE_CHECKING:
    import torch

#: Begins the kernel names.
PREFIX = "as_"
#: The op of both sides, by weight format.
PRODUCTS: Mapping[str, str] = {
    "int8_channel": "a8w8",
    "fp8_channel": "a8w8",
    "fp8_block": "a8w8_blockscale",
    "mxfp8": "a8w8_mxfp8",
    "mxfp4": "a4w4_blockscale",
    "nvfp4": "a4w4_nvfp4",
}


def quantiser(shape: Shape) -> Callable[..., tuple[Any, ...]]:
    """Return the function from the operands of a16wn to those of the other op."""
    form = format_of(shape)
    quantise, has_global = _rule(PRODUCTS[form.name], torch_dtype(form.dtypes[0])), form.has_global

    def quantised(x: torch.Tensor, weight: torch.Tensor, w_scale: torch.Tensor, *rest: Any) -> tuple[Any, ...]:
        values, x_scale, *x_global = quantise(x)
        bias = rest[3:] if len(rest) > 3 else ()
        return values, weight.view(values.dtype), x_scale, w_scale, *x_global, *(rest[2:3] if has_global else ()), *bias

    return quantised


def _rule(op: str, dtype: torch.dtype) -> Callable[..., tuple[Any, ...]]:
    """Return the default quantiser of an op's activations."""
    from tunedgemm.ops.formats import mxfp4, mxfp8, nvfp4, quant

    rules: dict[str, Callable[..., tuple[Any, ...]]] = {
        "a8w8": lambda x: quant.pertoken_quant(x, quant_dtype=dtype),
        "a8w8_blockscale": lambda x: quant.per_1x128_quant(x, dtype),
        "a8w8_mxfp8": mxfp8.per_1x32_f8_quant,
        "a4w4_blockscale": mxfp4.per_1x32_f4_quant,
        "a4w4_nvfp4": nvfp4.per_1x16_f4_quant,
    }
    return rules[op]


def judged_as(op: Op, solution: Solution) -> Op:
    """Return the op with the reference and tolerance by which a solution is judged: usually its own."""
    name = solution.kernel_name.removeprefix(PREFIX)
    if solution.libtype != BUILTIN or name == solution.kernel_name or name not in PRODUCTS.values():
        return op
    other = op_named(name)

    def reference(shape: Shape, operands: tuple[Any, ...]) -> torch.Tensor:
        given = quantiser(shape)(*operands)
        return other.reference(other.shape_of(*given, otype=torch_dtype(shape.outdtype)), given)

    return attrs.evolve(op, reference=reference, tolerance=lambda shape: other.tolerance(as_other(shape)))


def as_other(shape: Shape) -> Shape:
    """Return the dtypes of the other product, in a shape of a16wn."""
    return attrs.evolve(shape, dtype=format_of(shape).dtypes[0])
