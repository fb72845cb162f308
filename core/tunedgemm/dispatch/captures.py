"""Graph captures in this process, and the counters of calls while shapes are captured."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tunedgemm.ops.op import Function

#: Ids of the graphs being captured. While it is empty, calls skip the driver query (0.3 us).
_captures: set[int] = set()

#: Stands among them for a graph whose capture began before `watch_graphs`.
_UNSEEN = 0


@functools.cache
def watch_graphs() -> None:
    """Keep track of the graphs that torch captures, so that calls ask the driver only while there is one.

    Called when shapes are captured, and not before: it replaces two methods of
    `torch.cuda.CUDAGraph`. A capture that begins without that class is not seen, and its calls
    count as eager ones.
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
    """Return a function that detects whether a call on this operand is captured; None on a CPU."""
    return torch._C._cuda_isCurrentStreamCapturing if operand.is_cuda else None


def is_captured(ask: Callable[[], bool] | None) -> bool:
    """Call what `capture_check` returned, but only while `watch_graphs` knows of a capture."""
    return ask is not None and bool(_captures) and ask()


def may_synchronize(operand: torch.Tensor) -> bool:
    """Return whether a thread may wait for a tensor's GPU: not while any thread captures a graph."""
    return not operand.is_cuda or not (_captures or torch._C._cuda_isCurrentStreamCapturing())


def with_call_counter(launcher: Function, counter: list[int], ask: Callable[[], bool] | None, operands: int) -> Function:
    """Wrap a launcher so that the calls it serves are counted, while shapes are captured.

    A call that raises is not counted: whatever serves it instead counts it.

    Args:
        launcher: the launcher.
        counter: the numbers of calls that ran at once, and that were recorded into graphs.
        ask: what `capture_check` returned.
        operands: how many each call has.
    """
    if ask is None:

        def counting(*operands: torch.Tensor | None) -> torch.Tensor:
            out = launcher(*operands)
            counter[0] += 1
            return out

        return counting

    captures = _captures

    # Operands by name cost 40 ns less than a tuple of them, of the 300 that a call may.
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
