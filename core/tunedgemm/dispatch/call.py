"""Call: one cache miss, with the properties of its operands that decide how it is served."""

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
from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import OperandError, PluginError
from tunedgemm.ops.formats.dual_layout import PLAIN_TYPES
from tunedgemm.ops.formats.scales import ShuffledScale
from tunedgemm.ops.formats.shuffle import ShuffledWeight
from tunedgemm.ops.key import Key
from tunedgemm.ops.layout import SHUFFLED_ADDRESSES, forget_stale
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape

Operands = tuple[Any, ...]
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@attrs.frozen(eq=False)
class Call:
    """One call of an op that missed the launcher cache.

    Attributes:
        op: the op.
        operands: the operands in the op's order; trailing absent ones are cut off.
        otype: output dtype; None for the op's default.
        fields: further keyword arguments of the op's `shape_of`.
        key: cache key of the call; None if the call is not cached.
        in_memory: whether every operand has an address where its values are stored.
        is_plain: whether kernels accept the operand types: tensors, parameters, shuffled weights
            and scales; False for other tensor subclasses.
        is_ready: whether all operands are contiguous (unless strided) and 16-byte aligned.
        needs_gradient: whether autograd must record a gradient or a tangent.
        is_captured: whether the current stream is capturing a CUDA graph.
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
        """Make a call from its operands; arguments as for the class.

        Raises:
            OperandError: an operand is missing or not a tensor, or a field is unknown to the op.
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
            if address in SHUFFLED_ADDRESSES and index in (*op.matrices, *op.shuffled_scales) and forget_stale(operand):
                key = None
        return cls(op, operands, otype, fields, key, held, plain, ready, needed, held and in_capture(operands[0]))

    @functools.cached_property
    def shape(self) -> Shape:
        """Return the shape of the call.

        Raises:
            OperandError: the operands do not form this op.
            ShapeError: N, K or the batch size is 0.
        """
        return self.op.shape_of(*self.operands, otype=self.otype, **self.fields)

    @functools.cached_property
    def device(self) -> Device:
        """Return the device of the first operand."""
        return device_of(self.operands[0].get_device())

    @property
    def may_wait(self) -> bool:
        """Check that the call runs eagerly, so that it may block on online tuning."""
        return self.is_plain and not (self.needs_gradient or self.is_captured or torch.compiler.is_compiling())

    @property
    def torch_reason(self) -> str:
        """Return why torch must serve the call; "" if tables and heuristics decide."""
        if self.needs_gradient:
            return "the call needs a gradient"
        if self.shape.m == 0:
            return "the batch is empty"
        return "" if self.is_plain else "an operand has a type that kernels do not take"


def _check_given(op: Op, operands: Operands, fields: Mapping[str, Any]) -> None:
    """Raise OperandError for a wrong number or type of operands, or an unknown field."""
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
    """Return the address of a tensor's values; None if memory does not hold them.

    None for sparse, nested, meta and zero tensors, under functional transforms, and for tensors
    with torch's negative bit.
    """
    if operand.layout is not torch.strided or operand.is_nested or operand.is_neg():
        return None
    try:
        address = operand.data_ptr()
    except RuntimeError:
        return None
    return address if address or not operand.numel() else None


def in_memory(operands: Operands) -> bool:
    """Check that every operand's values are in memory; False under `torch.jit.trace`."""
    if torch._C._get_tracing_state() is not None:
        return False
    return not any(isinstance(operand, torch.Tensor) and _address(operand) is None for operand in operands)


def has_tangent(operand: torch.Tensor | None) -> bool:
    """Check whether a tensor has a forward-mode tangent."""
    return operand is not None and forward_ad._current_level >= 0 and forward_ad.unpack_dual(operand).tangent is not None


def in_capture(operand: torch.Tensor) -> bool:
    """Check whether the current stream of an operand's GPU is capturing a graph."""
    return operand.is_cuda and torch.cuda.is_current_stream_capturing()


def is_ready(operand: torch.Tensor | None, strided: bool = False) -> bool:
    """Check that an operand is absent, or 16-byte aligned and (unless *strided*) contiguous."""
    return operand is None or ((strided or operand.is_contiguous()) and operand.data_ptr() % 16 == 0)


def checked(call: Call, out: Any) -> torch.Tensor:
    """Check and return the output of a launcher's first call; later outputs are not checked.

    Raises:
        PluginError: the output has the wrong type, shape, dtype or device.
    """
    x, shape = call.operands[0], call.shape
    if not _is_tensor(out, (*x.shape[:-1], shape.n), torch_dtype(shape.outdtype), x.device):
        fake = call.op.fake(*call.operands, otype=call.otype)  # an op may have another output shape
        if not _is_tensor(out, tuple(fake.shape), fake.dtype, fake.device):
            got = f"{tuple(out.shape)} {out.dtype} on {out.device}" if isinstance(out, torch.Tensor) else f"{out!r:.80}"
            raise PluginError(f"its output must be {tuple(fake.shape)} {fake.dtype} on {fake.device} (got {got})")
    return out  # type: ignore[no-any-return]


def _is_tensor(out: Any, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    return isinstance(out, torch.Tensor) and out.shape == sizes and out.dtype == dtype and out.device == device
