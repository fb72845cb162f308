"""Bind shapes before graph capture, and list those that a capture found unbound."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import torch

from tunedgemm.device import Device, current_device, device_of
from tunedgemm.dispatch.call import Call
from tunedgemm.dispatch.tuned_gemm import tgemm
from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import OperandError, UserError
from tunedgemm.ops import DEFAULT_OP, op_named, ops
from tunedgemm.shape import Shape

#: A call of an op: its name, its operands, and the dtype of the output or None.
OpCall = tuple[str, tuple[Any, ...], torch.dtype | None]


@runtime_checkable
class Calling(Protocol):
    """A module that lists the op calls of its forward."""

    def tuned_calls(self, m: int) -> Iterable[OpCall]:
        """Return the op calls for an input of m rows, with the module's weights."""


def prewarm(what: Iterable[Shape] | torch.nn.Module | None = None, *, m: int | Iterable[int] = (1,), device: Device | None = None) -> int:
    """Bind and run each shape once, so that graphs can be captured; return how many ran.

    Torch's GEMMs run, too, on the current and on another stream: they serve unbound shapes, and
    some of their libraries cannot initialise during a capture. All memory is released afterwards.

    Args:
        what: shapes of any ops; a model, whose linear layers run on their own weights; or None for
            every tuned shape of the device.
        m: for a model, the number of input rows (product of all dimensions but the last), or
            several numbers.
        device: by default the current one; a model's layers run on the device of their weights.

    Raises:
        UserError: a model's weights are on the meta device, or *m* is not a positive number.
    """
    if isinstance(what, torch.nn.Module):
        return _prewarm_model(what, tuple(dict.fromkeys([m] if isinstance(m, int) else m)))
    if what is None:
        count = sum(tgemm.of(op).prewarm(device=device) for op in ops())
        _start_torch((device or current_device()).index, torch.bfloat16)
        return count
    by_op: dict[str, list[Shape]] = {}
    for shape in what:
        by_op.setdefault(shape.op, []).append(shape)
    count = sum(tgemm.of(op).prewarm(listed, device) for op, listed in by_op.items())
    for dtype in {_at_least_16_bits(torch_dtype(shape.dtype)) for listed in by_op.values() for shape in listed}:
        _start_torch((device or current_device()).index, dtype)
    return count


def unbound() -> dict[Shape, int]:
    """Return the shapes first called during graph capture, with the captured calls torch serves.

    ``prewarm(unbound())`` binds them for the next capture and clears the list.
    """
    return {shape: count for dispatcher in tgemm.dispatchers for shape, count in dispatcher.unbound.items()}


def _prewarm_model(model: torch.nn.Module, rows: tuple[int, ...]) -> int:
    """Bind and run each shape of a model's layers, on the weights of its first such layer."""
    wrong = [count for count in rows if isinstance(count, bool) or not isinstance(count, int) or count < 1]
    if wrong or not rows:
        raise UserError(f"prewarm: m must be numbers of rows, at least 1 (got {wrong[0]!r})" if wrong else "prewarm: m holds no number")
    met: set[tuple[Shape, int]] = set()
    started: set[tuple[int, torch.dtype]] = set()
    count = 0
    with torch.no_grad():
        for name, module in model.named_modules():
            for op, operands, otype in (call for m in rows for call in _calls_of(name, module, m)):
                dispatcher, index = tgemm.of(op), operands[0].get_device()
                try:
                    shape = Call.of(dispatcher.op, operands, otype).shape
                except OperandError:  # no op serves this layer
                    continue
                if (shape, index) in met:
                    continue
                met.add((shape, index))
                count += dispatcher.warm(shape, device_of(index), operands)
                dtype = _at_least_16_bits(operands[0].dtype)
                if (index, dtype) not in started:
                    started.add((index, dtype))
                    _start_torch(index, dtype)
    return count


def _calls_of(name: str, module: torch.nn.Module, m: int) -> Iterator[OpCall]:
    """Yield the op calls of a module for an input of zeros."""
    weight = getattr(module, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.is_meta:
        raise UserError(f"prewarm: the weight of {name or type(module).__name__!r} is on the meta device; load the model first")
    if isinstance(module, Calling):
        yield from module.tuned_calls(m)
    elif isinstance(module, torch.nn.Linear) and weight is not None and weight.dim() == 2:
        x = torch.zeros(m, weight.shape[1], dtype=weight.dtype, device=weight.device)
        operands: tuple[torch.Tensor, ...] = (x, weight) if module.bias is None else (x, weight, module.bias)
        if Call.of(op_named(DEFAULT_OP), operands).is_plain and weight.is_contiguous() and weight.is_floating_point():
            yield DEFAULT_OP, operands, None


def _at_least_16_bits(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype that torch's GEMM supports: this one, or bf16 for integers and 8 bits."""
    return dtype if dtype.itemsize > 1 and dtype.is_floating_point else torch.bfloat16


def _start_torch(index: int, dtype: torch.dtype) -> None:
    """Run torch's GEMM with and without bias, on the current and on another stream of a GPU."""
    if index < 0:
        return
    with torch.cuda.device(index):
        ones = torch.ones(16, 16, dtype=dtype, device="cuda")
        current, other = torch.cuda.current_stream(), torch.cuda.Stream()
        for stream in (current, other):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                torch._C._nn.linear(ones, ones)  # not F.linear, which may be patched
                torch._C._nn.linear(ones, ones, ones[0])
        current.wait_stream(other)
        torch.cuda.synchronize()
