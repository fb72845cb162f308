"""One call: what tells it from others, and what may stand between it and its launcher."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import is_grad_enabled

from tunedgemm.dispatch.duals import dual, levels
from tunedgemm.errors import OperandError
from tunedgemm.ops.formats.contents import duplicate
from tunedgemm.ops.formats.shuffle import ShuffledWeight
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.workload.capture import Capture

Call = Callable[..., torch.Tensor]

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def call_key(op: Op, operands: tuple[Any, ...], otype: torch.dtype | None, fields: dict[str, Any]) -> tuple[Any, ...] | None:
    """What tells a call of any op from others; None where a field cannot be hashed, or an operand has no memory to look at.

    Raises:
        OperandError: an operand is no tensor.
    """
    key: list[Any] = [otype, tuple(fields.items())]
    aligned = True
    for place, operand in enumerate(operands):
        if operand is None:
            key.append(None)
            continue
        if not isinstance(operand, torch.Tensor):
            name = op.operands[place] if place < len(op.operands) else f"operand {place + 1}"
            raise OperandError(f"{op.name}: {name.rstrip('?')} must be a tensor (got {type(operand).__name__})")
        # An op may refuse one operand that is not contiguous and take another.
        key += (operand.shape, operand.dtype, operand.get_device(), type(operand), operand.is_contiguous())
        try:
            aligned = operand.data_ptr() % 16 == 0 and aligned
        except RuntimeError:
            return None
    key += (aligned, needs_gradient(operands))
    try:
        hash(key[1])
    except TypeError:
        return None
    return tuple(key)


def plain(operands: tuple[Any, ...]) -> bool:
    """Whether operands are tensors as launchers know them, and no subclass of another's making."""
    return all(operand is None or type(operand) in _PLAIN or isinstance(operand, ShuffledWeight) for operand in operands)


def memoryless(operands: tuple[Any, ...]) -> bool:
    """Whether an operand has no memory to look at, as in a functional transform (vmap, jvp, grad), or while a program is exported."""
    for operand in operands:
        if isinstance(operand, torch.Tensor):
            try:
                operand.data_ptr()
            except RuntimeError:
                return True
    return False


def needs_gradient(operands: tuple[Any, ...]) -> bool:
    """Whether a gradient, or a tangent of forward mode, is to be kept for one of the operands."""
    if levels and any(dual(operand) for operand in operands):
        return True
    return is_grad_enabled() and any(operand is not None and operand.requires_grad for operand in operands)


def may_wait(operands: tuple[Any, ...]) -> bool:
    """Whether a call is one for launchers that runs now, and so may wait while its shape is tuned: neither traced nor captured."""
    if not plain(operands) or needs_gradient(operands) or operands[0].is_meta or torch.compiler.is_compiling():
        return False
    return not (operands[0].is_cuda and torch.cuda.is_current_stream_capturing())


def out_of_memory(error: Exception) -> bool:
    """Whether a call failed for want of memory, which no solution is to blame for."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError)


def dense(operand: torch.Tensor | None) -> bool:
    """Contiguous and 16-byte aligned, as launchers expect; an absent operand is."""
    return operand is None or (operand.is_contiguous() and operand.data_ptr() % 16 == 0)


def copying(call: Call, native: Call | None, weights: tuple[int, ...]) -> Call:
    """The launcher behind one dense copy of the activations; torch where a weight would have to be copied each call.

    Args:
        native: torch's own call; None where there is none, so that a weight has to be copied, too.
    """

    def copied(*operands: torch.Tensor | None) -> torch.Tensor:
        if native is not None and not all(dense(operands[place]) for place in weights if place < len(operands)):
            return native(*operands)
        return call(*(operand if operand is None or dense(operand) else duplicate(operand, dense=True) for operand in operands))

    return copied


def eager_only(call: Call, native: Call) -> Call:
    """The launcher, except while a graph is captured, which it would spoil: there torch's own call."""
    capturing = torch.cuda.is_current_stream_capturing

    def eager(*operands: torch.Tensor | None) -> torch.Tensor:
        return native(*operands) if capturing() else call(*operands)

    return eager


def with_gradient(op: str, call: Call) -> Call:
    """Torch's own call for operands of which one requires a gradient or has a tangent; an OperandError where either would be lost."""
    hint = "call it under torch.no_grad(), or make parameters with requires_grad=False"

    def differentiable(*operands: torch.Tensor | None) -> torch.Tensor:
        try:
            out = call(*operands)
        except NotImplementedError as error:
            if not levels:
                raise
            raise OperandError(f"{op}: an operand has a tangent, and torch's own call has none to give: {error}") from error
        if levels and any(dual(operand) for operand in operands):
            if not dual(out):
                raise OperandError(f"{op}: an operand has a tangent of forward mode, and this op gives none for it; unpack_dual it first")
        elif not out.requires_grad:
            raise OperandError(f"{op}: an operand requires a gradient, and this op gives none for it; {hint}")
        return out

    return differentiable


#: The graphs that torch is capturing, by their ids. While there is none no call asks the driver, which takes it 0.3 us.
_captures: set[int] = set()

#: Stands among them for a graph whose capture had begun before they were watched.
_UNSEEN = 0


@functools.cache
def watch_graphs() -> None:
    """Have torch's graphs tell when their capture begins and ends, so that calls need not ask unless there is one.

    A capture that is begun without `torch.cuda.CUDAGraph` is not seen, and its calls count as if they ran at once.
    """
    graph = torch.cuda.CUDAGraph
    begin, end = graph.capture_begin, graph.capture_end

    @functools.wraps(begin)
    def capture_begin(self: torch.cuda.CUDAGraph, *args: Any, **kwargs: Any) -> Any:
        _captures.add(id(self))
        try:
            return begin(self, *args, **kwargs)
        except BaseException:
            _captures.discard(id(self))
            raise

    @functools.wraps(end)
    def capture_end(self: torch.cuda.CUDAGraph, *args: Any, **kwargs: Any) -> Any:
        try:
            return end(self, *args, **kwargs)
        finally:
            _captures.discard(id(self) if id(self) in _captures else _UNSEEN)

    graph.capture_begin, graph.capture_end = capture_begin, capture_end  # type: ignore[method-assign]
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        _captures.add(_UNSEEN)


def recording(operand: torch.Tensor) -> Callable[[], bool] | None:
    """How to ask whether a call on this operand is being recorded into a graph; None where no call is."""
    return torch._C._cuda_isCurrentStreamCapturing if operand.is_cuda else None


def recorded(ask: Callable[[], bool] | None) -> bool:
    """Whether a call is being recorded: what `recording` answers, asked only while `watch_graphs` knows of a capture."""
    return ask is not None and bool(_captures) and ask()


def noted(call: Call, capture: Capture, shape: Shape, operands: tuple[Any, ...]) -> Call:
    """The launcher of a call whose shape is captured, with a count of the calls that it answers."""
    ask = recording(operands[0])
    return counted(call, capture.meet(shape, recorded=recorded(ask)), ask, len(operands))


def counted(call: Call, counter: list[int], ask: Callable[[], bool] | None, operands: int) -> Call:
    """The launcher with a count of the calls that it answers, used while shapes are captured.

    One that raises is not counted: whoever serves the call instead counts it.

    Args:
        call: the launcher.
        counter: the calls that ran at once, and those that were recorded into graphs.
        ask: how to ask which a call is (`recording`); see `recorded`.
        operands: how many each call has.
    """
    if ask is None:

        def counting(*operands: torch.Tensor | None) -> torch.Tensor:
            out = call(*operands)
            counter[0] += 1
            return out

        return counting

    captures = _captures

    # Operands by name cost 40 ns less than a tuple of them, of the 300 that a call may.
    def of_two(x: torch.Tensor | None, weight: torch.Tensor | None) -> torch.Tensor:
        out = call(x, weight)
        counter[1 if captures and ask() else 0] += 1
        return out

    def of_three(x: torch.Tensor | None, weight: torch.Tensor | None, third: torch.Tensor | None) -> torch.Tensor:
        out = call(x, weight, third)
        counter[1 if captures and ask() else 0] += 1
        return out

    def of_any(*operands: torch.Tensor | None) -> torch.Tensor:
        out = call(*operands)
        counter[1 if captures and ask() else 0] += 1
        return out

    by_number: dict[int, Call] = {2: of_two, 3: of_three}
    return by_number.get(operands, of_any)
