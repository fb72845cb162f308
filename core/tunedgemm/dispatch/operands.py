"""Checks of a call's operands at a miss: their number, and whether their memory holds their values."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tunedgemm.errors import OperandError, ShapeError
from tunedgemm.ops.op import Op


def check_given(op: Op, operands: tuple[Any, ...], fields: Mapping[str, Any]) -> None:
    """Check the number of a call's operands and the names of its fields.

    Raises:
        OperandError: an operand is missing, or the op does not take one of them.
    """
    given, names = len(operands), op.operands
    if given > len(names):
        raise OperandError(f"{op.name}: too many operands (got {given}); pass {', '.join(names)}")
    if given < len(names) and names[given][-1] != "?":  # no operand follows an optional one
        raise OperandError(f"{op.name}: {names[given]} must be a tensor (got None); pass {', '.join(names)}")
    if fields and (unknown := sorted(set(fields) - _fields(op))):
        listed = ", ".join(sorted(_fields(op))) or "none"
        raise OperandError(f"{op.name}: unknown argument (got {unknown[0]!r}); known: {listed}")


def _fields(op: Op) -> frozenset[str]:
    """Return the names of an op's fields: arguments of `shape_of` but operands and otype."""
    parameters = inspect.signature(op.shape_of).parameters
    operands = {name.removesuffix("?") for name in op.operands}
    return frozenset(name for name, each in parameters.items() if each.kind is not each.VAR_POSITIONAL) - operands - {"otype"}


def has_no_storage(operands: tuple[Any, ...]) -> bool:
    """Check for a strided operand without an address.

    Functional transforms (vmap, jvp, grad) and the export of a program pass such operands.
    """
    for operand in operands:
        if isinstance(operand, torch.Tensor) and operand.layout is torch.strided:
            try:
                operand.data_ptr()
            except RuntimeError:
                return True
    return False


def in_memory(operands: tuple[Any, ...]) -> bool:
    """Check that the memory of each operand holds its values, as kernels take for granted.

    It does not for sparse, nested, meta and zero tensors, under functional transforms, and where
    torch negates values as it reads them. A trace needs operations that it sees instead.
    """
    if torch._C._get_tracing_state() is not None:
        return False
    for operand in operands:
        if not isinstance(operand, torch.Tensor):
            continue
        if operand.layout is not torch.strided or operand.is_nested or operand.is_neg():
            return False
        try:
            address = operand.data_ptr()
        except RuntimeError:
            return False
        if not address and operand.numel():
            return False
    return True


@contextlib.contextmanager
def outside_trace() -> Iterator[None]:
    """Pause `torch.jit.trace`, under which sizes are tensors."""
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]


def copied_to_memory(operand: Any) -> Any:
    """Return a negated or zero tensor as one whose memory holds its values, and any other unchanged."""
    if not isinstance(operand, torch.Tensor) or operand.layout is not torch.strided or operand.is_nested:
        return operand
    return operand.clone() if operand._is_zerotensor() else operand.resolve_neg() if operand.is_neg() else operand


def check_not_nested(op: Op, operands: tuple[Any, ...]) -> None:
    """Check that no operand is nested; raise OperandError that names one."""
    for name, operand in zip(op.operands, operands, strict=False):
        if isinstance(operand, torch.Tensor) and operand.is_nested:
            raise OperandError(f"{op.name}: {name.rstrip('?')} must have one size (got a nested tensor); pass its parts")


def check_strided(op: Op, operands: tuple[Any, ...], error: Exception) -> None:
    """Raise OperandError that names an operand whose layout was the cause of torch's *error*, if one is."""
    for name, operand in zip(op.operands, operands, strict=False):
        if isinstance(operand, torch.Tensor) and operand.layout is not torch.strided:
            text = f"{op.name}: {name.rstrip('?')}: torch's call does not take this layout (got {operand.layout})"
            raise OperandError(f"{text}; pass {name.rstrip('?')}.to_dense()") from error


def product_of_none(op: Op, operands: tuple[Any, ...], otype: torch.dtype | None, error: ShapeError) -> torch.Tensor:
    """Return the result of a call whose sizes no `Shape` has: nothing is multiplied where K, N or B is 0.

    It is the bias, or zeros, and keeps gradients. *error* is that of `Op.shape_of`, which has
    checked that the operands fit each other.

    Raises:
        ShapeError: no operand is empty.
    """
    if not any(isinstance(operand, torch.Tensor) and operand.numel() == 0 for operand in operands):
        raise error
    by_name = {name.removesuffix("?"): operand for name, operand in zip(op.operands, operands, strict=False) if operand is not None}
    out = op.fake(*operands, otype=otype).zero_()
    if (bias := by_name.get("bias")) is not None and out.numel():
        batch = bias.shape[: out.dim() - 2] if bias.dim() > 1 else ()
        out = out + bias.to(out.dtype).reshape(*batch, 1, out.shape[-1])
    if (factor := by_name.get("scale_c")) is not None:
        out = out * factor.to(out.dtype)
    for operand in operands:
        if operand is not None and operand.requires_grad and torch.is_grad_enabled():
            out = out + operand.reshape(-1)[:0].sum().to(out.dtype)
    return out
