"""Stage 4, measure: device time of one call, weights cold, captured in a graph, candidates interleaved.

Timing one candidate after the other is off by up to 10 %, because clocks fall under load: here every round runs each
candidate once, in random order, and candidates are compared by the medians over the same rounds.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tunedgemm.device import Device
from tunedgemm.launcher import Launcher
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.tuner.trial import Samples

#: Device time of one sample: long enough that what is around a graph's launch is under 1 % of it.
SAMPLE_US = 400.0
CPU_SAMPLE_US = 10_000.0
#: Weights are rotated over this many times the last-level cache.
COLD = 3
MAX_COPIES = 64
#: A guess at a call's time from its work, used only to size samples.
_GUESS = {"nvidia": (1.5e12, 3e14, 3.0), "amd": (1.5e12, 3e14, 5.0), "cpu": (1e10, 2e11, 5.0)}


def cache_bytes(device: Device) -> int:
    """Size of the last-level cache in bytes."""
    if device.kind == "cpu":
        return _cpu_cache()
    if device.gfx in ("gfx942", "gfx950"):
        return 256 << 20  # the Infinity Cache, which the properties do not report
    return int(torch.cuda.get_device_properties(device.torch_device).L2_cache_size)


def _cpu_cache() -> int:
    sizes = [32 << 20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) << {"K": 10, "M": 20, "G": 30}.get(text[-1], 0) if text[-1].isalpha() else int(text))
    return min(max(sizes), 256 << 20)


class Workload:
    """The operands of one shape on one device, and the sampler over them."""

    def __init__(self, op: Op, shape: Shape, device: Device, seed: int = 0) -> None:
        self.op, self.shape, self.device = op, shape, device
        bytes_per_s, flops_per_s, launch_us = _GUESS[device.kind]
        guess = launch_us + 1e6 * max(op.bytes_moved(shape) / bytes_per_s, op.flops(shape) / flops_per_s)
        first = op.make_inputs(shape, device.torch_device, seed)
        weight_bytes = max(1, sum(first[place].nbytes for place in op.weights))
        cache = cache_bytes(device)
        copies = min(max(2, -(-COLD * cache // weight_bytes)), MAX_COPIES, max(2, self._room() // weight_bytes))
        #: operand tuples: activations shared and warm, weights different in each
        self.copies = [first] + [self._rotated(first, seed + place) for place in range(1, copies)]
        # Where the copies do not outgrow the cache, each is used once a sample, after the cache was read over.
        small = copies * weight_bytes < 2 * cache
        on_cpu = device.kind == "cpu"
        enough = round((CPU_SAMPLE_US if on_cpu else SAMPLE_US) / guess)
        self.calls: int = max(2, min(copies, enough)) if on_cpu else copies if small else max(copies, enough)
        self._flush = torch.empty(COLD * cache // 4, dtype=torch.float32, device=device.torch_device).zero_() if small else None
        self._graphs: dict[Solution, tuple[torch.cuda.CUDAGraph, torch.cuda.Event, torch.cuda.Event]] = {}
        self._pool: Any = None
        self._stream = torch.cuda.Stream(device.torch_device) if device.kind != "cpu" else None
        self._random = random.Random(seed)

    def _room(self) -> int:
        """Bytes that rotated weights may take: a quarter of the device's free memory."""
        return torch.cuda.mem_get_info(self.device.torch_device)[0] // 4 if self.device.kind != "cpu" else 512 << 20

    def _rotated(self, first: tuple[Any, ...], seed: int) -> tuple[Any, ...]:
        fresh = self.op.make_inputs(self.shape, self.device.torch_device, seed)
        return tuple(fresh[place] if place in self.op.weights else operand for place, operand in enumerate(first))

    def __call__(self, launchers: Mapping[Solution, Launcher], rounds: int) -> dict[Solution, Samples | Exception]:
        """Time each launcher in *rounds* interleaved rounds; what a launcher raises is its answer."""
        timers: dict[Solution, Callable[[], Callable[[], float]]] = {}
        answers: dict[Solution, Samples | Exception] = {}
        for solution, launcher in launchers.items():
            try:
                timers[solution] = self._timer(solution, launcher)
            except Exception as error:  # a kernel may raise anything, also from inside a capture
                answers[solution] = error
        self._saturate(timers)
        samples: dict[Solution, list[float]] = {solution: [] for solution in timers}
        for _ in range(rounds):
            pending = {}
            for solution in self._random.sample(list(timers), len(timers)):
                if self._flush is not None:
                    self._flush.sum()
                pending[solution] = timers[solution]()
            for solution, finish in pending.items():
                samples[solution].append(finish())
        clock = self._clock()
        return {**answers, **{solution: Samples(tuple(us), clock) for solution, us in samples.items()}}

    def forget(self, keep: Mapping[Solution, Launcher]) -> None:
        """Drop the captured graphs of all but these solutions, to free their memory."""
        self._graphs = {solution: graph for solution, graph in self._graphs.items() if solution in keep}

    def _timer(self, solution: Solution, launcher: Launcher) -> Callable[[], Callable[[], float]]:
        """A function that starts one sample and returns the function that waits for its microseconds per call."""
        if self.device.kind == "cpu":
            return lambda: self._on_cpu(launcher.call)
        if not launcher.graph_safe:
            return lambda: self._eager(launcher.call)
        if solution not in self._graphs:
            self._graphs[solution] = self._capture(launcher.call)
        return lambda: self._replay(solution)

    def _on_cpu(self, call: Callable[..., Any]) -> Callable[[], float]:
        start = time.perf_counter_ns()
        for place in range(self.calls):
            call(*self.copies[place])
        us = (time.perf_counter_ns() - start) / 1e3 / self.calls
        return lambda: us

    def _eager(self, call: Callable[..., Any]) -> Callable[[], float]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for place in range(self.calls):
            call(*self.copies[place % len(self.copies)])
        end.record()
        return lambda: self._elapsed(start, end)

    def _elapsed(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / self.calls

    def _capture(self, call: Callable[..., Any]) -> tuple[torch.cuda.CUDAGraph, torch.cuda.Event, torch.cuda.Event]:
        """The calls of one sample as a graph, between two events that are part of it, so that its launch is not timed."""
        for place in (0, 1):  # loads modules and fills per-stream workspaces before the capture
            call(*self.copies[place])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        start = torch.cuda.Event(enable_timing=True, external=True)
        end = torch.cuda.Event(enable_timing=True, external=True)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # Not `torch.cuda.graph`, which empties the allocator's cache at each capture.
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool)
            try:
                start.record()
                for place in range(self.calls):
                    call(*self.copies[place % len(self.copies)])
                end.record()
                graph.capture_end()
            except Exception:
                self._pool = None  # a broken capture leaves the pool unusable
                with contextlib.suppress(Exception):
                    graph.capture_end()
                raise
        return graph, start, end

    def _replay(self, solution: Solution) -> Callable[[], float]:
        graph, start, end = self._graphs[solution]
        graph.replay()
        return lambda: self._elapsed(start, end)

    def _saturate(self, timers: Mapping[Solution, Callable[[], Callable[[], float]]]) -> None:
        """Run the candidates for a while, so that the first round meets the clocks of the later ones."""
        until = time.perf_counter() + (0.05 if self.device.kind != "cpu" else 0.0)
        while timers and time.perf_counter() < until:
            for start in timers.values():
                start()()

    def _clock(self) -> int:
        """SM clock in MHz where the driver tells, else 0."""
        if self.device.kind == "nvidia":
            with contextlib.suppress(Exception):  # needs NVML's Python bindings, which are optional
                return int(torch.cuda.clock_rate(self.device.torch_device))
        return 0


def median_and_noise(samples: tuple[float, ...]) -> tuple[float, float]:
    """The median and the half width of its 95 % interval by order statistics, relative to it."""
    ordered = sorted(samples)
    count = len(ordered)
    median = ordered[count // 2] if count % 2 else (ordered[count // 2 - 1] + ordered[count // 2]) / 2
    reach = 0.98 * count**0.5  # 1.96 * sqrt(n) / 2, the binomial interval of the median's rank
    low, high = ordered[max(0, int(count / 2 - reach))], ordered[min(count - 1, int(count / 2 + reach))]
    return median, (high - low) / 2 / median if median else 0.0
