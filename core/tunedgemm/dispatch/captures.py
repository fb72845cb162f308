"""Detect CUDA graph captures, and count calls while shapes are captured."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tunedgemm.ops.op import Function

#: Ids of the graphs being captured; while it is empty, calls skip the driver query (0.3 us).
_captures: set[int] = set()

#: Id in `_captures` for a capture that began before `watch_graphs`.
_UNSEEN = 0


@functools.cache
def watch_graphs() -> None:
    """Track torch's graph captures, so that calls query the driver only during one.

    It replaces two methods of `torch.cuda.CUDAGraph`, so it runs only when shapes are captured.
    Calls in a capture that begins without that class count as eager.
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


def capture_check(operand: torch.Tensor) -> Callable[[], bool] | None:
    """Return the driver query for a capture on the current stream; None for CPU operands."""
    return torch._C._cuda_isCurrentStreamCapturing if operand.is_cuda else None


def is_captured(ask: Callable[[], bool] | None) -> bool:
    """Run the query of `capture_check`, but only while `watch_graphs` tracks a capture."""
    return ask is not None and bool(_captures) and ask()


def may_synchronize(operand: torch.Tensor) -> bool:
    """Check that no thread captures a graph, during which synchronising the GPU is an error."""
    return not operand.is_cuda or not (_captures or torch._C._cuda_isCurrentStreamCapturing())


def with_call_counter(launcher: Function, counter: list[int], ask: Callable[[], bool] | None, operands: int) -> Function:
    """Wrap a launcher to count its calls.

    A call that raises is not counted; the launcher that serves it instead counts it.

    Args:
        launcher: the launcher.
        counter: numbers of eager calls and of calls recorded into graphs.
        ask: the query returned by `capture_check`.
        operands: number of operands of each call.
    """
    if ask is None:

        def counting(*operands: torch.Tensor | None) -> torch.Tensor:
            out = launcher(*operands)
            counter[0] += 1
            return out

        return counting

    captures = _captures

    # Named operands cost 40 ns less than *args; the budget of a call is 300 ns.
    def of_two(x: torch.Tensor | None, weight: torch.Tensor | None) -> torch.Tensor:
        out = launcher(x, weight)
        counter[1 if captures and ask() else 0] += 1
        return out

    def of_three(x: torch.Tensor | None, weight: torch.Tensor | None, third: torch.Tensor | None) -> torch.Tensor:
        out = launcher(x, weight, third)
        counter[1 if captures and ask() else 0] += 1
        return out

    def of_any(*operands: torch.Tensor | None) -> torch.Tensor:
        out = launcher(*operands)
        counter[1 if captures and ask() else 0] += 1
        return out

    by_number: dict[int, Function] = {2: of_two, 3: of_three}
    return by_number.get(operands, of_any)
