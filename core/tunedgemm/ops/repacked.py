"""Layouts of weights of `a16wn` that engines pack for their kernels. Imports no torch.

A repacked weight has the sizes and dtype of the checkpoint's; its bytes are in the layout's order.
Scales and zero points are [groups, N]. With act-order the columns of K are sorted by group, and
``w_index`` holds the column of x that belongs to each. `tunedgemm.ops.formats.repacked` packs them,
and notes which operands belong together, since their sizes and dtypes are often equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from tunedgemm.errors import OperandError
from tunedgemm.ops.layout import CHECKPOINT, REPACKED, noted_order
from tunedgemm.ops.weight_formats import E2M1, GROUP, WeightFormat, format_of
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch

MARLIN, MACHETE, HUMMING = REPACKED


@attrs.frozen
class Packing:
    """Order of the codes of a layout, and what it serves.

    Attributes:
        n, k: sizes into which N and K are split, the slowest part first; the first is the rest.
        orders: bits of a code -> the order in memory of the parts of N, then of K.
        kinds: values of `kind_of` that it serves.
        tiles: sizes of which N and K must be multiples, any of them.
        groups: numbers of elements of K that may share a scale; 0 for the whole row.
    """

    n: tuple[int, ...]
    k: tuple[int, ...]
    orders: dict[int, tuple[int, ...]]
    kinds: tuple[str, ...]
    tiles: tuple[tuple[int, int], ...]
    groups: tuple[int, ...]


_INTEGERS = ("uint4b8", "uint4", "uint8b128")
#: Marlin: a thread of a warp holds the fragments of mma.m16n8k16 of 16 rows and 16 elements of K.
#: Machete: a thread of two warpgroups holds those of wgmma.m64k16 of 128 rows and 64 elements of K.
#: 4-bit codes alternate within 8, so that one mask takes every other of them.
_MARLIN = Packing(
    (-1, 4, 2, 8),
    (-1, 2, 4, 2),
    {4: (4, 0, 3, 6, 1, 7, 2, 5), 8: (4, 0, 3, 6, 1, 2, 7, 5)},
    (*_INTEGERS, "float8_e4m3fn", "float4_e2m1f"),
    ((64, 128), (128, 64)),
    (0, 16, 32, 64, 128),
)
#: Humming has Marlin's codes. Its scales of floats and its zero points are others; symmetric
#: integers are the same in both, and have the layout of Marlin alone.
PACKINGS = {
    MARLIN: _MARLIN,
    MACHETE: Packing(
        (-1, 2, 4, 2, 8),
        (-1, 4, 2, 4, 2),
        {4: (5, 0, 1, 2, 4, 8, 6, 9, 7, 3), 8: (5, 0, 1, 2, 4, 8, 6, 7, 3, 9)},
        _INTEGERS,
        ((128, 64),),
        (0, 64, 128),
    ),
    HUMMING: attrs.evolve(_MARLIN, kinds=("uint4", "float8_e4m3fn", "float4_e2m1f")),
}


def kind_of(form: WeightFormat) -> str:
    """Return the engines' name of a format's codes; "" if they have none."""
    half = 1 << form.bits - 1
    if form.values == tuple(range(-half, half)):
        return f"uint{form.bits}b{half}"
    if form.values == tuple(range(2 * half)) and form.zeros is not None:
        return f"uint{form.bits}"
    if form.values == E2M1:
        return "float4_e2m1f"
    return {"int8": "uint8b128", "fp8_e4m3fn": "float8_e4m3fn"}.get(form.dtypes[0], "")


def stored_as(form: WeightFormat, layout: str) -> WeightFormat:
    """Return the format of the scales and zero points of a weight in a layout, which its name has, too."""
    if layout not in PACKINGS:
        return form
    keeps = form.has_global or "e8m0" in form.scale
    kept = attrs.evolve(form, name=f"{form.name} in layout {layout}", is_kn=True, rows=1, scale=form.scale if keeps else ())
    return attrs.evolve(kept, order=(0,), dtypes=()) if layout == MACHETE else kept


def check_tied(op: str, layout: str, **operands: torch.Tensor | None) -> None:
    """Check that no operand of a weight is known to belong to a weight of another layout.

    Copies, written operands and an engine's own are not known.

    Raises:
        OperandError: one is.
    """
    wanted = CHECKPOINT if layout == "row" else layout
    for name, operand in operands.items():
        noted = "" if operand is None else noted_order(operand)
        if noted in (CHECKPOINT, *REPACKED) and noted != wanted:
            remedy = "pass all operands that repack_weight returned, or all of the checkpoint; of memory with other bytes now, a clone"
            raise OperandError(f"{op}: {name} belongs to a weight of layout {noted} (got a weight of layout {wanted}); {remedy}")


def misfit(shape: Shape) -> str:
    """Return why a weight of `a16wn` cannot have the shape's layout; "" if it can."""
    if shape.layout == "row":
        return ""
    form, packing = format_of(shape), PACKINGS.get(shape.layout)
    if packing is None:
        return f"layout must be row or {' or '.join(PACKINGS)} (got {shape.layout})"
    if kind_of(form) not in packing.kinds:
        return f"layout {shape.layout} has no {form.name}; pass the weight as the checkpoint stores it"
    if "e8m0" in form.scale and shape.dtype not in form.exact:
        return f"{form.name} in layout {shape.layout} needs x in {form.exact[0]} (got {shape.dtype})"
    if shape[GROUP] not in packing.groups:
        return f"{GROUP} in layout {shape.layout} must be {' or '.join(map(str, packing.groups))} (got {shape[GROUP]})"
    if any(shape.n % n == 0 and shape.k % k == 0 for n, k in packing.tiles):
        return ""
    wanted = " or ".join(f"{n} and {k}" for n, k in packing.tiles)
    return f"layout {shape.layout} needs N and K to be multiples of {wanted} (got {shape.n} and {shape.k})"
