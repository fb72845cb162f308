"""Gradients and tangents: torch's implementation keeps them, or the call is an error.

In batch-invariant mode a float product has the forward bits of its class and torch's gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from tunedgemm.dispatch.call import has_tangent
from tunedgemm.dispatch.fallback import TorchFailed
from tunedgemm.errors import OperandError
from tunedgemm.ops.op import Function, Op
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


def has_two_products(op: Op, shape: Shape) -> bool:
    """Check whether the backward pass of a shape is two products: of floats, plain and unscaled."""
    is_float_product = op.operands[:3] == ("x", "weight", "bias?") and shape.scale == "none" and shape.layout == "row"
    return is_float_product and shape.m > 0 and shape.dtype in ("bf16", "fp16", "fp32") and open_dual_levels() == 0


def with_torch_backward(launcher: Function) -> Function:
    """Wrap the launcher of a product so that gradients are torch's products.

    Hooks of saved tensors, as of activation checkpoints, may raise after the launcher has returned.
    """

    def product(*operands: torch.Tensor | None) -> Any:
        returned: list[bool] = []

        def launched(*given: torch.Tensor | None) -> torch.Tensor:
            out = launcher(*given)
            returned.append(True)
            return out

        try:
            return _Product.apply(launched, *operands)
        except BaseException as error:
            if not returned:
                raise
            raise TorchFailed from error

    return product


class _Product(torch.autograd.Function):
    """A product whose output has a launcher's bits, and whose gradients are torch's."""

    @staticmethod
    def forward(ctx: Any, launcher: Function, x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor | None) -> torch.Tensor:
        keep_product(ctx, x, weight, *bias)
        return launcher(x, weight, *bias).data  # autograd forbids writing into a view, such as a reshaped output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, *gradients_of_product(ctx, gradients[0], ctx.needs_input_grad[1:])


def keep_product(ctx: Any, x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor | None) -> None:
    """Save what the gradients of a product need."""
    ctx.save_for_backward(x, weight)
    ctx.bias = [None if each is None else (each.shape, each.dtype) for each in bias]


def gradients_of_product(ctx: Any, gradient: torch.Tensor, needs: Sequence[bool]) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of x, weight and biases, by torch's products."""
    x, weight = ctx.saved_tensors
    rows = gradient.reshape(-1, weight.shape[0])
    wide = torch.promote_types(x.dtype, rows.dtype)  # as torch's own call
    given = rows.to(wide)
    of_x, of_weight, *of_bias = needs
    return (
        (given @ weight.to(wide)).to(x.dtype).reshape(x.shape) if of_x else None,
        (given.t() @ x.reshape(-1, weight.shape[1]).to(wide)).to(weight.dtype) if of_weight else None,
        *(rows.sum(0).to(kind[1]).reshape(kind[0]) if kind and needed else None for kind, needed in zip(ctx.bias, of_bias, strict=True)),
    )


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
