"""How the conformance suite launches: one shape's operands and launchers, in threads and in graphs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from tunedgemm.backends.launcher import Launcher
from tunedgemm.device import Device
from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import OperandError
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.tuner.accuracy import MAX_ERROR_RATIO, errors


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
        ratio, row = errors(out, wanted, tolerance)
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
    """The operands as made, with a leading dimension of 1, and with the rows in two halves: of x alone, then of all activations.

    What the op does not take in that form, or takes as another shape, is left out.
    """
    yield case.operands
    op, shape = case.op, case.shape
    heads = [(1, shape.m)] + ([(2, shape.m // 2)] if shape.m % 2 == 0 else [])
    seen = []
    for head in heads:
        for places in ((0,), tuple(place for place in range(len(case.operands)) if place not in op.weights)):
            again = tuple(_folded(o, head, shape.m) if place in places else o for place, o in enumerate(case.operands))
            sizes = [None if operand is None else operand.shape for operand in again]
            with contextlib.suppress(OperandError):
                if sizes not in seen and op.shape_of(*again, otype=torch_dtype(shape.outdtype), **op.fields(shape)) == shape:
                    yield again
            seen.append(sizes)


def _folded(operand: Any, head: tuple[int, int], m: int) -> Any:
    """The M rows of an activation in another number of dimensions; what has no such rows as it is."""
    by_row = operand is not None and operand.dim() >= 2 and operand.shape[0] == m
    return operand.reshape(*head, *operand.shape[1:]) if by_row else operand


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

    from tunedgemm.ops.formats.contents import duplicate, overwrite

    held = [None if operand is None else duplicate(operand) for operand in operands]
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
            overwrite(old, new)
    out.view(torch.uint8).fill_(0xFF)
    graph.replay()
    torch.cuda.synchronize()
    return out
