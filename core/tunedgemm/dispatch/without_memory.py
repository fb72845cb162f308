"""Calls whose operands' values are not in memory (traced, meta, lazy), and empty products."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from tunedgemm.dispatch.call import Call, in_memory
from tunedgemm.dispatch.gradients import differentiable, with_gradient
from tunedgemm.dispatch.traced import Binding, stand_in
from tunedgemm.errors import OperandError, ShapeError


def serve_without_memory(dispatcher: Binding, call: Call) -> torch.Tensor:
    """Serve a call with an operand whose values are not in memory.

    A traced call becomes a custom op in the graph. Negated and zero tensors are materialised.
    Torch serves the others.

    Raises:
        OperandError: the operands do not form this op, one needs a gradient that the op does not
            compute, or torch does not support one.
    """
    op, operands = call.op, call.operands
    in_graph = stand_in(dispatcher, call) if _has_no_storage(call) else None
    if in_graph is not None:
        return with_gradient(op.name, in_graph)(*operands) if call.needs_gradient else in_graph(*operands)
    copies = tuple(map(_copied_to_memory, operands))
    if in_memory(copies):
        return dispatcher.call(*copies, otype=call.otype, **call.fields)
    for name, _ in _strange(call, lambda operand: operand.is_nested):
        raise OperandError(f"{op.name}: {name} must have one size (got a nested tensor); pass its parts")
    try:
        with _outside_trace():
            shape = call.shape
    except ShapeError as error:
        return product_of_none(call, error)
    if operands[0].is_meta and not call.needs_gradient:
        return op.fake(*operands, otype=call.otype)
    native = dispatcher.torch_fallback(shape, call.device)
    try:
        return differentiable(shape, native)(*operands) if call.needs_gradient else native(*operands)
    except (NotImplementedError, RuntimeError) as error:
        for name, operand in _strange(call, lambda operand: operand.layout is not torch.strided):
            text = f"{op.name}: {name}: torch's call does not take this layout (got {operand.layout})"
            raise OperandError(f"{text}; pass {name}.to_dense()") from error
        raise


def _has_no_storage(call: Call) -> bool:
    """Check for a strided operand without storage, as vmap, jvp, grad and torch.export pass."""
    for _, operand in _strange(call, lambda operand: operand.layout is torch.strided):
        try:
            operand.data_ptr()
        except RuntimeError:
            return True
    return False


def _strange(call: Call, is_strange: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors of the operands that satisfy *is_strange*."""
    for name, operand in zip(call.op.operands, call.operands, strict=False):
        if operand is not None and is_strange(operand):
            yield name.removesuffix("?"), operand


@contextlib.contextmanager
def _outside_trace() -> Iterator[None]:
    """Suspend `torch.jit.trace`, under which sizes are tensors."""
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]


def _copied_to_memory(operand: torch.Tensor | None) -> torch.Tensor | None:
    """Materialise a negated or zero tensor; return any other unchanged."""
    if operand is None or operand.layout is not torch.strided or operand.is_nested:
        return operand
    return operand.clone() if operand._is_zerotensor() else operand.resolve_neg() if operand.is_neg() else operand


def product_of_none(call: Call, error: ShapeError) -> torch.Tensor:
    """Return the result for K, N or B = 0, which no `Shape` has: the bias or zeros.

    Gradients are kept. *error* is the one that `Call.shape` raised, after it checked the operands.

    Raises:
        ShapeError: no operand is empty, so *error* has another cause.
    """
    given = {name.removesuffix("?"): each for name, each in zip(call.op.operands, call.operands, strict=False) if each is not None}
    if all(operand.numel() for operand in given.values()):
        raise error
    out = call.op.fake(*call.operands, otype=call.otype).zero_()
    if (bias := given.get("bias")) is not None and out.numel():
        batch = bias.shape[: out.dim() - 2] if bias.dim() > 1 else ()
        out = out + bias.to(out.dtype).reshape(*batch, 1, out.shape[-1])
    if (factor := given.get("scale_c")) is not None:
        out = out * factor.to(out.dtype)
    for operand in given.values():
        if operand.requires_grad and torch.is_grad_enabled():
            out = out + operand.reshape(-1)[:0].sum().to(out.dtype)
    return out
