"""Foldings: the operands of a shape with other leading dimensions, or scales of other forms."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import OperandError, ShapeError
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape


def foldings(op: Op, shape: Shape, operands: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield the operands with zero to three leading dimensions, some of size 1.

    First only x is folded, then all activations. Forms that the op rejects, or that have another
    shape, are skipped.
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


def other_forms(op: Op, shape: Shape, operands: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield the operands with scales and biases in other valid sizes, or as bytes."""
    for form in _FORMS:
        given = operands
        for index, operand in enumerate(operands):
            named = any(word in op.operands[index] for word in ("scale", "bias"))
            if operand is None or not (named or form is _as_bytes):
                continue
            other = form(operand)
            if other is None or (other.shape == operand.shape and other.dtype == operand.dtype):
                continue
            changed = (*given[:index], other, *given[index + 1 :])
            with contextlib.suppress(OperandError, ShapeError):
                if op.shape_of(*changed, otype=torch_dtype(shape.outdtype), **op.fields(shape)) == shape:
                    given = changed
        if given is not operands:
            yield given


def _as_bytes(operand: Any) -> Any:
    return operand.view(torch.uint8) if operand.dtype in (torch.float8_e8m0fnu, torch.float4_e2m1fn_x2) else None


def _turned(operand: Any) -> Any:
    """Turn columns [..., n, 1] into rows [..., 1, n], and the reverse; None for others."""
    sizes = operand.shape
    return operand.reshape(*sizes[:-2], sizes[-1], sizes[-2]) if operand.dim() > 1 and 1 in sizes[-2:] else None


_FORMS: tuple[Callable[[Any], Any], ...] = (
    lambda operand: operand.reshape(-1),
    lambda operand: operand.reshape(1, -1),
    lambda operand: operand.reshape(()) if operand.numel() == 1 else None,
    lambda operand: operand.squeeze(-1),
    lambda operand: operand.unsqueeze(-2) if operand.dim() == 2 else None,
    _turned,
    _as_bytes,
)


def _folded(operand: Any, head: tuple[int, ...], m: int) -> Any:
    """Reshape the M rows of an activation; return an operand without M rows unchanged."""
    by_row = operand is not None and operand.dim() >= 2 and operand.shape[0] == m
    return operand.reshape(*head, *operand.shape[1:]) if by_row else operand
