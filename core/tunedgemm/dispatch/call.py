"""Call: one call of an op, with the facts about its operands."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch import is_grad_enabled
from torch.autograd import forward_ad

from tunedgemm.device import Device, device_of
from tunedgemm.errors import OperandError
from tunedgemm.ops.formats.dual_layout import PLAIN_TYPES
from tunedgemm.ops.formats.scales import ShuffledScale
from tunedgemm.ops.formats.shuffle import ShuffledWeight
from tunedgemm.ops.key import Key
from tunedgemm.ops.layout import SHUFFLED_ADDRESSES, forget_freed
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape

Operands = tuple[Any, ...]
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@attrs.frozen(eq=False)
class Call:
    """One call of an op that no cached launcher serves, with the facts about its operands.

    Attributes:
        op: the op.
        operands: in the op's order, without absent ones at the end.
        otype: dtype of the output; the op's default if None.
        fields: further arguments of the op's `shape_of`.
        key: the cache key; None where there is none, and nothing is cached.
        in_memory: whether the memory of each operand holds its values.
        is_plain: whether kernels take the operands' types: tensors, parameters, shuffled weights
            and scales.
        is_ready: whether all operands are as launchers take them.
        needs_gradient: whether the gradient or the tangent of an operand must be kept.
        is_captured: whether the current stream captures a graph.
    """

    op: Op
    operands: Operands
    otype: torch.dtype | None
    fields: Mapping[str, Any]
    key: Key | None
    in_memory: bool
    is_plain: bool
    is_ready: bool
    needs_gradient: bool
    is_captured: bool

    @classmethod
    def of(
        cls, op: Op, operands: Operands, otype: torch.dtype | None = None, fields: Mapping[str, Any] = _NOTHING, key: Key | None = None
    ) -> Call:
        """Make the value of a call; arguments as for the class.

        Raises:
            OperandError: an operand is missing or not a tensor, or the op does not take one of the
                arguments.
        """
        while operands and operands[-1] is None:
            operands = operands[:-1]
        _check_given(op, operands, fields)
        held, plain, ready, needed = torch._C._get_tracing_state() is None, True, True, False
        graded, in_level = is_grad_enabled(), forward_ad._current_level >= 0
        for index, operand in enumerate(operands):
            if operand is None:
                continue
            plain = plain and (type(operand) in PLAIN_TYPES or isinstance(operand, (ShuffledWeight, ShuffledScale)))
            needed = needed or (graded and operand.requires_grad) or (in_level and has_tangent(operand))
            address = _address(operand) if held else None
            held = address is not None
            ready = ready and address is not None and address % 16 == 0 and (index in op.strided or operand.is_contiguous())
            if address in SHUFFLED_ADDRESSES and index in op.matrices and forget_freed(operand):
                key = None
        return cls(op, operands, otype, fields, key, held, plain, ready, needed, held and in_capture(operands[0]))

    @functools.cached_property
    def shape(self) -> Shape:
        """Return the shape.

        Raises:
            OperandError: the operands do not form this op.
            ShapeError: a size is 0 that no shape has as 0.
        """
        return self.op.shape_of(*self.operands, otype=self.otype, **self.fields)

    @functools.cached_property
    def device(self) -> Device:
        """Return the device that runs the call."""
        return device_of(self.operands[0].get_device())

    @property
    def may_wait(self) -> bool:
        """Check that the call runs now, neither traced nor captured, so that it may wait for tuning."""
        return self.is_plain and not (self.needs_gradient or self.is_captured or torch.compiler.is_compiling())

    @property
    def torch_reason(self) -> str:
        """Return why torch serves the call, whatever tables and heuristics say; "" where they decide."""
        if self.needs_gradient:
            return "the call needs a gradient"
        if self.shape.m == 0:
            return "the batch is empty"
        return "" if self.is_plain else "an operand has a type that kernels do not take"


def _check_given(op: Op, operands: Operands, fields: Mapping[str, Any]) -> None:
    """Check the operands' number and types, and the names of the fields."""
    name, names, given = op.name, op.operands, len(operands)
    if given > len(names):
        raise OperandError(f"{name}: too many operands (got {given}); pass {', '.join(names)}")
    for position, operand in enumerate(operands):
        if operand is None and names[position][-1] != "?":
            given = min(given, position)
        elif operand is not None and not isinstance(operand, torch.Tensor):
            raise OperandError(f"{name}: {names[position].rstrip('?')} must be a tensor (got {operand!r:.80})")
    if given < len(names) and names[given][-1] != "?":  # no operand follows an optional one
        raise OperandError(f"{name}: {names[given]} must be a tensor (got None); pass {', '.join(names)}")
    if fields and (unknown := sorted(set(fields) - op.field_names)):
        listed = ", ".join(sorted(op.field_names)) or "none"
        raise OperandError(f"{name}: unknown argument (got {unknown[0]!r}); known: {listed}")


def _address(operand: torch.Tensor) -> int | None:
    """Return where memory holds a tensor's values; None where it does not, as kernels take for granted.

    It does not for sparse, nested, meta and zero tensors, under functional transforms, and where
    torch negates values as it reads them.
    """
    if operand.layout is not torch.strided or operand.is_nested or operand.is_neg():
        return None
    try:
        address = operand.data_ptr()
    except RuntimeError:
        return None
    return address if address or not operand.numel() else None


def in_memory(operands: Operands) -> bool:
    """Check that the memory of each operand holds its values; a trace needs operations that it sees."""
    if torch._C._get_tracing_state() is not None:
        return False
    return not any(isinstance(operand, torch.Tensor) and _address(operand) is None for operand in operands)


def has_tangent(operand: torch.Tensor | None) -> bool:
    """Check whether a tensor has a tangent of an open level."""
    return operand is not None and forward_ad._current_level >= 0 and forward_ad.unpack_dual(operand).tangent is not None


def in_capture(operand: torch.Tensor) -> bool:
    """Check whether the current stream of an operand's GPU captures a graph."""
    return operand.is_cuda and torch.cuda.is_current_stream_capturing()


def is_ready(operand: torch.Tensor | None, strided: bool = False) -> bool:
    """Check that an operand is absent, or aligned to 16 bytes and, unless *strided*, contiguous."""
    return operand is None or ((strided or operand.is_contiguous()) and operand.data_ptr() % 16 == 0)
