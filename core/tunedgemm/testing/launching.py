"""How the conformance suite launches: one shape's operands and launchers, in threads and in graphs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from tunedgemm.accuracy import MAX_ERROR_RATIO, error_ratio, worst_row_error
from tunedgemm.device import Device
from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import OperandError
from tunedgemm.launcher import Launcher
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution


@attrs.frozen(eq=False)
class Case:
    """One shape on the present device, with the solutions of the backend that bind there."""

    shape: Shape
    device: Device
    op: Op
    operands: tuple[Any, ...]
    reference: Any
    launchers: tuple[tuple[Solution, Launcher], ...]
    refusals: tuple[tuple[Solution, object], ...]

    def fault(self, out: Any, reference: Any = None) -> str:
        """What is wrong with the numbers of an output; "" for a right one."""
        tolerance, wanted = self.op.tolerance(self.shape), self.reference if reference is None else reference
        ratio, row = error_ratio(out, wanted, tolerance), worst_row_error(out, wanted)
        if ratio <= MAX_ERROR_RATIO and row <= tolerance.row_error:
            return ""
        return f"error ratio {ratio:.3g} (bound {MAX_ERROR_RATIO}), worst row error {row:.3g} (bound {tolerance.row_error:.3g})"


def launch(solution: Solution, launcher: Launcher, operands: Sequence[Any]) -> Any:
    """The output of one call; an AssertionError that names the solution where it raises."""
    try:
        return launcher.call(*operands)
    except Exception as error:  # a plugin may raise anything
        sizes = ", ".join("None" if operand is None else f"{tuple(operand.shape)} {operand.dtype}" for operand in operands)
        raise AssertionError(f"{solution} raised {type(error).__name__} for {sizes}: {error}") from error


def foldings(case: Case) -> Iterator[tuple[Any, ...]]:
    """The operands with x as made, with a leading dimension of 1, and with its rows in two halves."""
    yield case.operands
    x, rest = case.operands[0], case.operands[1:]
    folded = [x.unsqueeze(0)] + ([x.reshape(2, x.shape[0] // 2, *x.shape[1:])] if x.shape[0] % 2 == 0 else [])
    for again in folded:
        with contextlib.suppress(OperandError):  # an op whose x has a fixed number of dimensions
            if case.op.shape_of(again, *rest, otype=torch_dtype(case.shape.outdtype)) == case.shape:
                yield (again, *rest)


def concurrent_calls(solution: Solution, launcher: Launcher, start: threading.Barrier, operands: tuple[Any, ...]) -> list[Any]:
    """The outputs of several calls from this thread, on a stream of its own."""
    import torch

    def several() -> list[Any]:
        start.wait(timeout=60)
        return [launch(solution, launcher, operands) for _ in range(4)]

    device = operands[0].device
    if device.type == "cpu":
        return several()
    torch.cuda.synchronize(device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        outs = several()
    stream.synchronize()
    return outs


def replayed(solution: Solution, launcher: Launcher, operands: tuple[Any, ...], later: tuple[Any, ...]) -> Any:
    """The output of a graph captured over *operands*, replayed after they were given the values of *later*."""
    import torch

    held = [None if operand is None else operand.clone() for operand in operands]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch(solution, launcher, held)  # what is slow once happens before a capture
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch(solution, launcher, held)
    for old, new in zip(held, later, strict=True):
        if old is not None:
            old.copy_(new)
    out.view(torch.uint8).fill_(0xFF)
    graph.replay()
    torch.cuda.synchronize()
    return out
