"""Compare two kernels on a loaded model's weights: outputs, then times of captured graphs.

Graphs cycle through the weights of all layers, so that caches are cold, and write the activations
before each call, as in a model.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tunedgemm_engines.phases import phase

#: Rounds per comparison, and least bytes of weights per graph: three times the largest L2 (60 MB).
_ROUNDS, _BYTES = 9, 180 << 20
#: Shortest sample in milliseconds: events resolve half a microsecond.
_SAMPLE = 0.5
#: Least speed-up that counts, since start-up is noisy and a wrong row would run in every layer.
_NOISE = 1.02
#: Most rows of the outputs that are compared, at equal distances.
_ROWS = 64


class Arms:
    """The stream that captures graphs, and a time budget.

    Args:
        seconds: time budget of measuring, without compilation, which the engine's warm-up would
            need, too.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.stream = torch.cuda.Stream()

    @property
    def spent(self) -> bool:
        """Return whether the budget is spent."""
        return self.seconds <= 0


def faster(arms: Arms, ours: Callable[..., Any], theirs: Callable[..., Any], calls: Sequence[tuple[Any, ...]], tolerance: float) -> float:
    """Measure the speed of *ours* relative to *theirs*.

    Args:
        arms: the stream and the budget.
        ours, theirs: functions of the operands of each call.
        calls: operands, one call for each layer.
        tolerance: largest relative difference of the outputs (Frobenius).

    Returns:
        The speed-up, at most 1 if within noise; or minus the outputs' relative difference if that
        exceeds *tolerance*.

    Raises:
        Exception: raised by a kernel or its capture.
    """
    few = calls[: needed(calls[0])]
    try:
        with torch.inference_mode():
            if not (difference := difference_of(ours, theirs, few[0])) <= tolerance:
                return -difference
            torch.cuda.synchronize()
            start = time.monotonic()
            graphs = [_captured(arms, function, few) for function in (theirs, ours)]
            repeats = [max(1, round(_SAMPLE / max(_milliseconds(graph, 1), 1e-3))) for graph in graphs]
            ratios = []
            for turn in range(_ROUNDS):
                times = {side: _milliseconds(graphs[side], repeats[side]) for side in ((0, 1) if turn % 2 else (1, 0))}
                ratios.append(times[0] / times[1])
            arms.seconds -= time.monotonic() - start
    except Exception:
        with contextlib.suppress(RuntimeError):  # the error may be the device's
            torch.cuda.synchronize()
        raise
    gain = sorted(ratios)[_ROUNDS // 2]
    return gain if gain >= _NOISE else min(gain, 1.0)


def needed(operands: tuple[Any, ...]) -> int:
    """Return how many layers a graph needs, so that caches are cold.

    Args:
        operands: of the call of one layer, the weight second.
    """
    size: int = operands[1].nbytes
    return max(2, -(-_BYTES // max(1, size)))


def difference_of(
    ours: Callable[..., Any], theirs: Callable[..., Any], operands: tuple[Any, ...], called: str = "the engine's first calls"
) -> float:
    """Compute the relative difference of two outputs, in the columns that both have.

    Args:
        ours, theirs: functions of the operands.
        operands: of the call.
        called: the phase that the time of *theirs* counts for.

    Returns:
        The difference, infinite if one is not finite.
    """
    with phase("our first calls"):
        out = _spread(ours(*operands))
    with phase(called):
        expected = _spread(theirs(*operands))
    out = out[..., : expected.shape[-1]]
    difference = float((out - expected).norm() / expected.norm().clamp(min=1e-30))
    return difference if math.isfinite(difference) else math.inf


def _spread(out: torch.Tensor) -> torch.Tensor:
    """Copy some rows, as an engine's kernel may return a workspace that the next call writes to."""
    return out[:: max(1, -(-len(out) // _ROWS))].to(torch.float32, copy=True)


def _captured(arms: Arms, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> torch.cuda.CUDAGraph:
    from tunedgemm.integrations import touch  # of the tuner, whose modules a second start does not need

    arms.stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(arms.stream):
        for operands in calls[:2]:
            function(*operands)
    torch.cuda.current_stream().wait_stream(arms.stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=arms.stream):
        for operands in calls:
            touch(operands[0])
            function(*operands)
    return graph


def _milliseconds(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    """Time one replay, as the mean of several."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / repeats
