"""Stage 5 on the device: operands of one shape, and interleaved rounds of samples.

Clocks fall under load, so timing solutions one after the other errs by up to 10 %. Here every round
runs each solution once, in random order, and solutions are compared within rounds.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from tunedgemm.architectures import ARCHITECTURES
from tunedgemm.backends.launcher import Launcher
from tunedgemm.device import Device
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.tuner.clocks import clocks
from tunedgemm.tuner.roofline import guess_us
from tunedgemm.tuner.trial import Samples

#: Device time of a sample in microseconds, so that a graph launch adds less than 1 %.
SAMPLE_US = 400.0
CPU_SAMPLE_US = 10_000.0
#: Size of the rotated weights in last-level caches, on GPUs and CPUs. At 3x, an H100 still cached
#: a part: M = 1 took up to 13 % less than with a gigabyte of weights.
COLD, CPU_COLD = 8, 3
#: Size, in last-level caches, of the buffer that flushes them.
FLUSH = 3
MAX_COPIES = 64
#: Fewest copies of a weight on a GPU. With two of 235 MB, one kernel took 58.3 or 62.7 us on an
#: H200, depending on their addresses; with five always 57.6.
FEWEST_COPIES = 5
#: Idle seconds after which a GPU is warmed up to its load clock, and the longest warm-up. Power
#: limits act within tenths of a second.
IDLE, SATURATION = 0.03, 0.25
#: Most rounds that a warm-up of one step precedes: those of the screen, which anchors normalise.
ROUGH_ROUNDS = 2
#: Seconds per step of the warm-up, which ends when two steps differ by less than this fraction.
STEP, SETTLED = 0.025, 0.003
#: Fewest empty samples before the first round, and most recent ones used: with one or two, an
#: interrupt would make all times too short.
LEAST_TOUCHES, RECENT_TOUCHES = 5, 51
#: A sample that takes so many times the solution's shortest had to wait for another process, whose
#: time slices take milliseconds; it is taken again, so often at most.
INTERRUPTED, RETAKEN = 2.0, 3
#: Least plausible microseconds of a call.
LEAST_US = 0.01
#: Most bytes that `touch` rewrites.
_TOUCHED = 16 << 10
#: Starts a sample; returns a function that waits for it and returns microseconds per call.
Start = Callable[[], Callable[[], float]]
#: Checks (solution, output, index of the operand set); raises for a wrong output.
Judge = Callable[[Solution, torch.Tensor, int], None]


@attrs.frozen(eq=False)
class _Graph:
    """A captured sample, the events at its start and end, and a copy of its last output."""

    sample: torch.cuda.CUDAGraph
    start: torch.cuda.Event
    end: torch.cuda.Event
    copy: torch.cuda.CUDAGraph | None


def start_of(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes at the start of *x*, whatever its dtype and strides."""
    start = torch.empty(0, dtype=torch.uint8, device=x.device)
    return start.set_(x.untyped_storage(), x.storage_offset() * x.itemsize, (min(x.nbytes, _TOUCHED),), (1,))


def touch(x: torch.Tensor) -> None:
    """Launch a small kernel that rewrites the start of *x* with the same bits."""
    start_of(x).bitwise_or_(0)


def cache_bytes(device: Device) -> int:
    """Return the size of the last-level cache in bytes."""
    if device.kind == "cpu":
        return _cpu_cache()
    hidden = ARCHITECTURES[device.gfx].cache_mib << 20 if device.gfx in ARCHITECTURES else 0
    return hidden or int(torch.cuda.get_device_properties(device.torch_device).L2_cache_size)


def _cpu_cache() -> int:
    sizes = [32 << 20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) << {"K": 10, "M": 20, "G": 30}.get(text[-1], 0) if text[-1].isalpha() else int(text))
    return min(max(sizes), 256 << 20)


class Workload:
    """The operands of a shape on a device, and the sampler over them.

    Args:
        op, shape, device: the op, the shape and the device.
        seed: seed of the operands and of the order within rounds.
        cache: ``cold`` rotates through weights larger than the last-level cache, ``hot`` uses one
            copy.
        timing: ``graph`` replays captured calls if a launcher allows it, ``eager`` launches them.
    """

    def __init__(self, op: Op, shape: Shape, device: Device, seed: int = 0, *, cache: str = "cold", timing: str = "graph") -> None:
        self.op, self.shape, self.device, self._graphed = op, shape, device, timing == "graph"
        guess = guess_us(op, shape, device)
        first = op.make_inputs(shape, device.torch_device, seed)
        weight_bytes = max(1, sum(operand.nbytes for index, operand in enumerate(first) if index in op.weights and operand is not None))
        size, hot = cache_bytes(device), cache == "hot"
        on_cpu = device.kind == "cpu"
        enough = max(2, round((CPU_SAMPLE_US if on_cpu else SAMPLE_US) / guess))  # calls per sample
        cold = -(-CPU_COLD * size // weight_bytes) if on_cpu else min(-(-COLD * size // weight_bytes), enough)
        fewest = 2 if hot or on_cpu else FEWEST_COPIES
        copies = 2 if hot else min(max(fewest, cold), MAX_COPIES, max(2, self._room() // weight_bytes))
        #: operand tuples with shared activations and different weights, for timing and verification
        self.copies = [first] + [self._rotate(first, seed + index) for index in range(1, copies)]
        self._used = self.copies[:1] if hot else self.copies
        # If the cache could hold some copies, a sample uses each once, after a flush.
        small = not hot and copies * weight_bytes < (2 if on_cpu else COLD) * size
        #: calls per sample
        self.calls: int = enough if hot else min(copies, enough) if on_cpu else copies if small else max(copies, enough)
        self._flush = torch.empty(FLUSH * size // 4, dtype=torch.float32, device=device.torch_device).zero_() if small else None
        #: checks the last output of each sample; None for no check
        self.judge: Judge | None = None
        self._last: Any = None  # output of the last eager call
        self._kept: Any = None  # output of the last captured call
        self._graphs: dict[Solution, _Graph] = {}
        self._touches: _Graph | None = None  # an empty sample
        self._touch_us: deque[float] = deque(maxlen=RECENT_TOUCHES)
        self._launched: set[Solution] = set()
        self._first_us: list[float] = []  # on a CPU: microseconds of each solution's second call
        self._settled = False
        self._pool: Any = None
        self._stream = None if on_cpu else torch.cuda.Stream(device.torch_device)
        self._random = random.Random(seed)
        self._worked = float("-inf")  # time.perf_counter of the device's last work
        self._is_settled = False  # whether the last warm-up was a full one

    def _room(self) -> int:
        """Return the most bytes for rotated weights: a quarter of the free device memory."""
        return torch.cuda.mem_get_info(self.device.torch_device)[0] // 4 if self.device.kind != "cpu" else 512 << 20

    def _rotate(self, first: tuple[Any, ...], seed: int) -> tuple[Any, ...]:
        fresh = self.op.make_inputs(self.shape, self.device.torch_device, seed)
        return tuple(fresh[index] if index in self.op.weights else operand for index, operand in enumerate(first))

    def __call__(self, launchers: Mapping[Solution, Launcher], rounds: int) -> dict[Solution, Samples | Exception]:
        """Time each launcher in *rounds* interleaved rounds; return its exception if it raises.

        Raises:
            Exception: the driver's error if the device's context is broken.
        """
        timers: dict[Solution, Start] = {}
        answers: dict[Solution, Samples | Exception] = {}
        for solution, launcher in launchers.items():
            try:
                timers[solution] = self.prepare(solution, launcher)
            except Exception as error:  # a kernel may raise anything, also from inside a capture
                answers[solution] = error
        self._settle()
        self._saturate(timers, is_rough=rounds <= ROUGH_ROUNDS)
        if self._touches and not self._touch_us:
            self._touch_us.extend(self._replay(self._touches)() for _ in range(LEAST_TOUCHES))
        samples: dict[Solution, list[float]] = {solution: [] for solution in timers}
        mhz, throttled = 0, ""
        for number in range(rounds):
            pending = {}
            touched = self._replay(self._touches) if self._touches else None
            for solution in self._random.sample(list(samples), len(samples)):
                try:
                    finish = self._begin(timers[solution])
                    if number == rounds - 1 and self.judge is not None:
                        self.judge(solution, self._last_output(solution), len(self._used) - 1)
                    pending[solution] = finish
                except Exception as error:
                    self._drop_failed(solution, error, samples, answers)
            if number == rounds - 1:
                mhz, throttled = clocks(self.device)  # while the round still runs
            for solution, finish in pending.items():
                try:
                    samples[solution].append(self._uninterrupted(finish, timers[solution], samples[solution]))
                except Exception as error:
                    self._drop_failed(solution, error, samples, answers)
            if touched:
                self._touch_us.append(touched())
        self._worked, self._last = time.perf_counter(), None
        timed = {solution: Samples(self._alone(solution, us), self.calls, mhz, throttled) for solution, us in samples.items()}
        return {**answers, **timed}

    def _uninterrupted(self, finish: Callable[[], float], start: Start, before: Sequence[float]) -> float:
        """Return a sample; of a GPU that another process uses, the shortest of some in its place."""
        us, left = finish(), RETAKEN if self.device.kind != "cpu" else 0
        while before and left and us > INTERRUPTED * min(before):
            us, left = min(us, self._begin(start)()), left - 1
        return us

    def _begin(self, start: Start) -> Callable[[], float]:
        """Start a sample with cold caches."""
        if self._flush is not None:
            self._flush.sum()
        return start()

    def _last_output(self, solution: Solution) -> Any:
        """Return the output of the last call in the current sample."""
        graph = self._graphs.get(solution)
        if graph is not None and graph.copy is not None:
            graph.copy.replay()
            return self._kept
        return self._last

    def _alone(self, solution: Solution, samples: Sequence[float]) -> tuple[float, ...]:
        """Subtract the time of touches from the samples of a captured solution."""
        if solution not in self._graphs:
            return tuple(samples)
        less = statistics.median(self._touch_us)
        return tuple(max(us - less, LEAST_US) for us in samples)

    def _settle(self) -> None:
        """Reduce the calls per sample on a CPU once, if calls are slower than guessed."""
        if self.device.kind == "cpu" and self._first_us and not self._settled:
            self.calls = min(self.calls, max(2, round(CPU_SAMPLE_US / min(self._first_us))))
            self._settled = True

    def _drop_failed(
        self, solution: Solution, error: Exception, samples: dict[Solution, list[float]], answers: dict[Solution, Samples | Exception]
    ) -> None:
        """Remove a failed solution from the rounds; raise if the device's context is broken."""
        del samples[solution]
        answers[solution] = error
        if self.device.kind != "cpu":
            torch.cuda.synchronize(self.device.torch_device)

    def forget(self, keep: Mapping[Solution, Launcher]) -> None:
        """Free the captured graphs of all but these solutions."""
        self._graphs = {solution: graph for solution, graph in self._graphs.items() if solution in keep}
        self._launched &= set(keep)
        if not self._graphs:
            self._touches = self._pool = None  # torch forbids a capture into a pool without graphs

    def prepare(self, solution: Solution, launcher: Launcher) -> Start:
        """Run a solution's first calls and capture its sample, once; return what takes a sample."""
        on_cpu = self.device.kind == "cpu"
        if on_cpu or not self._graphed or not launcher.graph_safe:
            if solution not in self._launched:
                self._first_calls(launcher)
                self._launched.add(solution)
            return lambda: self._on_cpu(launcher.call) if on_cpu else self._eager(launcher.call)
        if solution not in self._graphs:
            self._first_calls(launcher)
            self._graphs[solution] = self._capture(launcher.call)
            self._touches = self._touches or self._capture(lambda *_: None)
        return lambda: self._replay(self._graphs[solution])

    def _on_cpu(self, call: Callable[..., Any]) -> Callable[[], float]:
        start = time.perf_counter_ns()
        self._last = self._calls(call)
        us = (time.perf_counter_ns() - start) / 1e3 / self.calls
        return lambda: us

    def _calls(self, call: Callable[..., Any]) -> Any:
        """Run the calls of a sample; return the last output.

        The others are freed at once, so that all calls write to the same memory.
        """
        used = self._used
        for number in range(1 - self.calls, 0):
            call(*used[(number - 1) % len(used)])
        return call(*used[-1])

    def _eager(self, call: Callable[..., Any]) -> Callable[[], float]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self._last = self._calls(call)
        end.record()
        return lambda: self._elapsed(start, end)

    def _elapsed(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / self.calls

    def _first_calls(self, launcher: Launcher) -> None:
        """Run warm-up calls, which load modules, allocate per-stream workspaces and copy weights."""
        for operands in (*(self._used if launcher.keeps_weights else ()), *self.copies[:2]):
            start = time.perf_counter_ns()
            launcher.call(*operands)
        if self.device.kind == "cpu":
            self._first_us.append((time.perf_counter_ns() - start) / 1e3)
        else:
            torch.cuda.synchronize(self.device.torch_device)

    def _capture(self, call: Callable[..., Any]) -> _Graph:
        """Capture the calls of a sample between two events in the graph: its launch is not timed.

        Each follows a `touch`: a GEMM follows a kernel that writes its input, as in a model. It
        cannot overlap with the previous GEMM, for instance by programmatic dependent launch.
        """
        touched = start_of(self.copies[0][0])  # all copies share it

        def after_touch(*operands: Any) -> Any:
            touched.bitwise_or_(0)
            return call(*operands)

        start = torch.cuda.Event(enable_timing=True, external=True)
        end = torch.cuda.Event(enable_timing=True, external=True)

        def sample() -> Any:
            start.record()
            out = self._calls(after_touch)
            end.record()
            return out

        graph, out = self._captured(sample)
        copy = None
        if out is not None and self.judge is not None:  # other graphs share its memory in the pool
            kept = self._kept = torch.empty_like(out) if self._kept is None else self._kept
            copy, _ = self._captured(lambda: kept.copy_(out))
        graph.replay()  # uploads the graph; a failure blames this solution
        torch.cuda.synchronize(self.device.torch_device)
        return _Graph(graph, start, end, copy)

    def _captured(self, action: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Capture an action in the shared pool; return the graph and the action's result."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # `torch.cuda.graph` would empty the allocator's cache at each capture.
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool)
            try:
                answer = action()
                graph.capture_end()
            except Exception:
                self._pool = None  # a broken capture leaves the pool unusable
                with contextlib.suppress(Exception):
                    graph.capture_end()
                raise
        return graph, answer

    def _replay(self, captured: _Graph) -> Callable[[], float]:
        captured.sample.replay()
        return lambda: self._elapsed(captured.start, captured.end)

    def _saturate(self, timers: Mapping[Solution, Start], is_rough: bool) -> None:
        """Warm up an idle GPU until its times settle, so that all rounds have equal clocks.

        Rough times only need a busy GPU.
        """
        begun = time.perf_counter()
        if self.device.kind == "cpu" or not timers or (begun - self._worked < IDLE and (is_rough or self._is_settled)):
            return
        self._is_settled = not is_rough
        load, before = next(iter(timers.values())), 0.0
        with contextlib.suppress(Exception):  # the first round reports the error again
            while (step := time.perf_counter()) < begun + (STEP if is_rough else SATURATION):
                us: list[float] = []
                while not us or time.perf_counter() < step + STEP:
                    us.append(load()())
                now = sorted(us)[len(us) // 2]
                if abs(now - before) <= SETTLED * now:
                    break
                before = now
