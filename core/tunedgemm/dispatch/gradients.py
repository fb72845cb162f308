"""Gradients and tangents: torch's implementation keeps them, or the call is an error."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from tunedgemm.dispatch.call import has_tangent
from tunedgemm.errors import OperandError
from tunedgemm.ops.op import Function
from tunedgemm.shape import Shape


def open_dual_levels() -> int:
    """Count the open levels of forward-mode differentiation, which all threads share.

    A tensor with a tangent has the address, type and sizes of one without. So no launcher is
    cached inside a level, and the level is part of every cache key.
    """
    return forward_ad._current_level + 1


def differentiable(shape: Shape, call: Function) -> Function:
    """Wrap torch's implementation to give gradients and tangents, zero for an empty batch."""
    return with_gradient(shape.op, call) if shape.m else _with_zero_gradients(call)


def _with_zero_gradients(call: Function) -> Function:
    """Wrap the call of an empty batch so that all operands get zero gradients."""

    def empty(*operands: torch.Tensor | None) -> torch.Tensor:
        out = call(*operands)
        for operand in operands:
            if operand is not None and (operand.requires_grad or has_tangent(operand)):
                out = out + (operand[:0] if operand.dim() else operand).to(out.dtype).sum()  # a sum over no elements
        return out

    return empty


def with_gradient(op: str, call: Function) -> Function:
    """Wrap torch's implementation to raise OperandError where it would lose a gradient or tangent."""
    hint = "call it under torch.no_grad(), or make parameters with requires_grad=False"

    def differentiable(*operands: torch.Tensor | None) -> torch.Tensor:
        try:
            out = call(*operands)
        except NotImplementedError as error:
            if not open_dual_levels():
                raise
            raise OperandError(f"{op}: an operand has a tangent, but torch's call has no forward derivative: {error}") from error
        if any(map(has_tangent, operands)):
            if not has_tangent(out):
                raise OperandError(f"{op}: an operand has a tangent, which this op does not propagate; unpack_dual it first")
        elif not out.requires_grad or _lacks_derivative(out.grad_fn, tuple(each.grad_fn for each in operands if each is not None)):
            raise OperandError(f"{op}: an operand requires a gradient, which this op does not compute; {hint}")
        return out

    return differentiable


def _lacks_derivative(node: Any, given: tuple[Any, ...]) -> bool:
    """Search the autograd graph for a node without a derivative; torch raises only in backward."""
    met, waiting = set(given), [node]
    while waiting:
        node = waiting.pop()
        if node is None or node in met:
            continue
        if node.name().endswith("NotImplemented"):
            return True
        met.add(node)
        waiting += [before for before, _ in node.next_functions]
    return False
