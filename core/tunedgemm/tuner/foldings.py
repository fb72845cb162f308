"""Foldings: the operands of one shape with other leading dimensions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import OperandError
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape


def foldings(op: Op, shape: Shape, operands: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield the operands with none to three leading dimensions, some of size 1.

    First x alone is folded, then all activations, in one way. Forms that the op refuses, or takes
    as another shape, are left out.
    """
    halves = (2, shape.m // 2) if shape.m % 2 == 0 else (1, shape.m)
    heads = [halves, (1, shape.m), () if shape.m == 1 else (shape.m, 1), (halves[0], 1, halves[1])]
    yielded: list[Any] = []
    activations = tuple(index for index in range(len(operands)) if index not in op.weights)
    for folded, head in (*(((0,), head) for head in heads), (activations, halves)):
        again = tuple(_folded(o, head, shape.m) if index in folded else o for index, o in enumerate(operands))
        sizes = [None if operand is None else operand.shape for operand in again]
        with contextlib.suppress(OperandError):
            if sizes not in yielded and op.shape_of(*again, otype=torch_dtype(shape.outdtype), **op.fields(shape)) == shape:
                yield again
        yielded.append(sizes)


def _folded(operand: Any, head: tuple[int, ...], m: int) -> Any:
    """Reshape the M rows of an activation; return an operand without M rows unchanged."""
    by_row = operand is not None and operand.dim() >= 2 and operand.shape[0] == m
    return operand.reshape(*head, *operand.shape[1:]) if by_row else operand
