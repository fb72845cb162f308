"""Checks of a shared launcher: repeated calls, graphs on two streams, threads.

Each check gets the operands of several calls of one shape. By default (*fault*), outputs must be
bitwise equal to those of plain calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs

from tunedgemm.backends.launcher import Launcher
from tunedgemm.ops.accuracy import same_bits
from tunedgemm.ops.formats.tensor_bytes import duplicate, overwrite
from tunedgemm.testing.launching import launch

Operands = tuple[Any, ...]
#: Returns the fault of an output, given the index of its operands; "" for a right one.
Fault = Callable[[int, Any], str]

#: Calls per thread on a GPU and on a CPU, where fakes are slow and threads switch often.
_GPU_CALLS, _CPU_CALLS = 4, 2
#: Launches per graph; the second detects state left by the first, such as counters.
_LAUNCHES = 2
#: Replays between checks, so that streams overlap; each check synchronises the device.
_UNCHECKED = 20


def bits_of_plain_calls(launcher: Launcher, given: Sequence[Operands]) -> Fault:
    """Call the launcher with each operands, and return the check that outputs have these bits."""
    wanted = [duplicate(launch(launcher, operands)) for operands in given]
    return lambda index, out: "" if same_bits(out, wanted[index]) else "has other bits than a plain call"


def differing_calls(launcher: Launcher, operands: Operands, calls: int) -> int:
    """Return how many of several calls, launched one after another, give other bits than the first."""
    import torch

    first = duplicate(launch(launcher, operands)).view(torch.uint8)
    return int(sum((launch(launcher, operands).view(torch.uint8) != first).any() for _ in range(calls)))


@attrs.frozen(eq=False)
class _Captured:
    """A graph of launches, the operands that it reads, and the outputs that it writes."""

    stream: Any
    graph: Any
    operands: list[Any]
    outs: list[Any]

    @classmethod
    def of(cls, launcher: Launcher, operands: Operands) -> _Captured:
        """Capture launches over copies of the operands, on a new stream."""
        import torch

        held = [None if operand is None else duplicate(operand) for operand in operands]
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            launch(launcher, held)  # slow first calls happen before a capture
        with torch.cuda.graph(graph, stream=stream):
            outs = [launch(launcher, held) for _ in range(_LAUNCHES)]
        for out in outs:
            out.view(torch.uint8).fill_(0xFF)
        return cls(stream, graph, held, outs)

    def replay(self, operands: Operands) -> None:
        """Replay the graph on its stream, with new contents of its operands."""
        import torch

        with torch.cuda.stream(self.stream):
            for old, new in zip(self.operands, operands, strict=True):
                if old is not None:
                    overwrite(old, new)
            self.graph.replay()


def fault_of_graphs(launcher: Launcher, given: Sequence[Operands], *, replays: int = 4, fault: Fault | None = None) -> str:
    """Return the fault of two graphs of a launcher, replayed at once with other operands each time."""
    import torch

    fault = fault or bits_of_plain_calls(launcher, given)
    graphs = [_Captured.of(launcher, given[0]) for _ in range(2)]
    torch.cuda.synchronize()
    for replay in range(replays):
        chosen = [(replay + place) % len(given) for place in range(len(graphs))]
        for captured, index in zip(graphs, chosen, strict=True):
            captured.replay(given[index])
        if replay % _UNCHECKED == _UNCHECKED - 1 or replay == replays - 1:
            torch.cuda.synchronize()
            for captured, index in zip(graphs, chosen, strict=True):
                for out in captured.outs:
                    if found := fault(index, out):
                        return f"replay {replay} of a graph: {found}"
    return ""


def fault_of_threads(launcher: Launcher, given: Sequence[Operands], *, calls: int = 0, fault: Fault | None = None) -> str:
    """Return the fault of threads, one for each operands and each on its stream; "" for none.

    Args:
        calls: how many each thread makes; 0 for a few.
    """
    fault = fault or bits_of_plain_calls(launcher, given)
    start = threading.Barrier(len(given))
    with ThreadPoolExecutor(len(given)) as pool:
        outs = list(pool.map(lambda operands: _calls_of_a_thread(launcher, operands, start, calls), given))
    faults = (found for index, several in enumerate(outs) for out in several if (found := fault(index, out)))
    return next(faults, "")


def _calls_of_a_thread(launcher: Launcher, operands: Operands, start: threading.Barrier, calls: int) -> list[Any]:
    """Return the outputs of several calls from this thread, on a separate stream."""
    import torch

    def call(count: int) -> list[Any]:
        start.wait(timeout=60)
        return [launch(launcher, operands) for _ in range(count)]

    device = operands[0].device
    if device.type == "cpu":
        return call(calls or _CPU_CALLS)
    torch.cuda.synchronize(device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        outs = call(calls or _GPU_CALLS)
    stream.synchronize()
    return outs
