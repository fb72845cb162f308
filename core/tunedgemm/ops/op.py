"""Op: what one tensor signature must state about itself. An op is one file beside this one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch


@attrs.frozen
class Tolerance:
    """How far an output may be from the reference.

    Attributes:
        atol, rtol: bounds of one element, ``|out - ref| <= atol + rtol * |ref|``; the share of elements outside
            them is AITER's error ratio.
        row_error: bound of ``norm(out - ref) / norm(ref)`` for the worst row of the output.
    """

    atol: float
    rtol: float
    row_error: float


@attrs.frozen
class Columns:
    """The CSV format of an op's tables: AITER's columns in AITER's order.

    Attributes:
        tuned_file, untuned_file: AITER's default file names.
        variable: the environment variable that names other files.
        key: columns of the untuned file; the tuned file has gfx and cu_num before them.
        values: columns of the tuned file after its key.
        parse: one row as texts, absent columns left out, to a Shape; raises UserError for what is wrong.
        format: a Shape to the texts of `key` and, where they say more than AITER's columns, of `layout` and `scale`.
    """

    tuned_file: str
    untuned_file: str
    variable: str
    key: tuple[str, ...]
    values: tuple[str, ...]
    parse: Callable[[Mapping[str, str]], Shape]
    format: Callable[[Shape], dict[str, str]]


@attrs.frozen
class Op:
    """One op family.

    Attributes:
        name: the word of ``--op``, of `Shape.op` and of a backend's ``OPS``.
        operands: names of the operands in a launcher's order; optional ones end in ``?`` and come last.
        weights: positions of the operands that a model keeps, and that are cold when a layer runs.
        columns: the format of its tables.
        shape_of: the operands and the output dtype (or None) to a Shape; raises OperandError for what is no such op.
        make_inputs: (shape, torch device, seed) to random operands, absent trailing ones left out.
        reference: (shape, operands) to the exact result in float32 or float64, computed from the operands as given.
        tolerance: shape to Tolerance.
        flops: shape to floating-point operations of one call.
        bytes_moved: shape to the fewest bytes of memory traffic of one call.
        fake: the operands and the output dtype to an empty output, for meta tensors.
    """

    name: str
    operands: tuple[str, ...]
    weights: tuple[int, ...]
    columns: Columns
    shape_of: Callable[..., Shape]
    make_inputs: Callable[[Shape, torch.device, int], tuple[Any, ...]]
    reference: Callable[[Shape, tuple[Any, ...]], torch.Tensor]
    tolerance: Callable[[Shape], Tolerance]
    flops: Callable[[Shape], int]
    bytes_moved: Callable[[Shape], int]
    fake: Callable[..., torch.Tensor]
