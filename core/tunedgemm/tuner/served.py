"""Stage 7, served: verify the winner on all calls that its row serves, not only the timed one.

The row of M = 64 also serves smaller M, any leading dimensions and bias dtypes, weights updated in
place, and long-running processes. ``docs/tuning.md`` lists what stays undetected.
"""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import torch

from tunedgemm.backends.launcher import Launcher
from tunedgemm.device import Device
from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import OperandError
from tunedgemm.ops.formats.tensor_bytes import moved
from tunedgemm.ops.padded_m import serving
from tunedgemm.ops.quantised import BIAS_DTYPES
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported
from tunedgemm.timing import Timing
from tunedgemm.tuner.changes import PART, Changes
from tunedgemm.tuner.foldings import foldings, other_forms
from tunedgemm.tuner.trial import failed
from tunedgemm.tuner.verify import Variant, Verifier, worse_of
from tunedgemm.tuner.watching import dispatched, swallowed_exceptions

#: Most outputs, and bytes of them, kept alive at the same time.
WINDOW, WINDOW_BYTES = 16, 1 << 30
#: Repeated calls, their time limit in seconds, and the interval at which outputs are judged.
CALLS, SECONDS, LOOKED_AT = 1100, 0.2, 7
#: Calls from each of two concurrent threads.
THREADED = 4
#: Most smaller M to verify, the least and the largest among them.
FEWER_ROWS = 4

Bind = Callable[[Shape], Launcher | Unsupported]


@attrs.frozen(eq=False)
class Served:
    """Final checks of a shape's winner.

    Attributes:
        verifier: operands and references of the shape.
        device: the device.
        baseline: torch's call; None if it does not run.
    """

    verifier: Verifier
    device: Device
    baseline: Launcher | None

    def check(self, solution: Solution, launcher: Launcher, bind: Bind, *, is_torchs: bool = False) -> Timing:
        """Verify all calls that a row with this solution serves.

        Args:
            solution: the solution.
            launcher: its launcher for the shape.
            bind: binds the solution at another M or bias dtype.
            is_torchs: whether this is a solution of torch.

        Returns:
            A Timing without a time, with status ``ok``, ``wrong``, or that of the failure.
        """
        shape, worst = self.verifier.shape, Timing(self.verifier.shape, solution, "ok")
        try:
            self._call_often(solution, launcher)
            self._call_from_threads(solution, launcher)
            fault = self.verifier.memory_fault(launcher, self._window) or ("" if is_torchs else self._substitution_fault(launcher, bind))
        except Exception as error:  # a kernel may raise anything
            return failed(shape, solution, error)
        if fault:
            return attrs.evolve(worst, status="wrong", err_ratio=1.0, detail=fault)
        for variant in self._variants():
            bound = launcher if variant.shape == shape else bind(variant.shape)
            if isinstance(bound, Unsupported):  # dispatch then uses the next row
                continue
            timing = self.verifier.verify(solution, bound.call, variant)
            if timing.status == "ok" and variant.change is None and (fault := self.verifier.memory_fault(bound, 2, variant.operands)):
                timing = attrs.evolve(timing, status="wrong", err_ratio=1.0, detail=fault)
            if timing.status != "ok":
                return attrs.evolve(timing, detail=f"{variant.what}: {timing.detail}"[:500])
            worst = worse_of(worst, timing)
        return worst

    @property
    def _operands(self) -> tuple[Any, ...]:
        return self.verifier.operand_sets[0]

    @functools.cached_property
    def _expected(self) -> torch.Tensor:
        return self.verifier.expected(self.verifier.variant(0))

    @property
    def _window(self) -> int:
        size = self._expected.numel() * torch_dtype(self.verifier.shape.outdtype).itemsize
        return max(3, min(WINDOW, WINDOW_BYTES // max(1, size)))

    def _substitution_fault(self, launcher: Launcher, bind: Bind) -> str:
        """Return the fault of a launcher that silently falls back to torch; else "".

        It is detected by two signs together: torch dispatches the same operations as the baseline,
        and the backend's Python code swallows an exception in `bind` or a launch.
        """
        if self.baseline is None or dispatched(launcher, self._operands) != dispatched(self.baseline, self._operands):
            return ""
        swallowed: list[str] = []
        with swallowed_exceptions(swallowed), torch.no_grad():
            bound = bind(self.verifier.shape)
            (launcher if isinstance(bound, Unsupported) else bound).call(*self._operands)
        return f"it ran torch's own call after its kernel failed: {swallowed[0]}" if swallowed else ""

    def _call_often(self, solution: Solution, launcher: Launcher) -> None:
        """Call the launcher many times and judge some outputs; later checks detect side effects."""
        first = self._operands[0]
        clock = time.monotonic if first.is_cuda else time.thread_time  # CPU time is independent of other processes
        until = clock() + SECONDS
        for number in range(CALLS):
            with torch.no_grad():
                out = launcher.call(*self._operands)
            if number % LOOKED_AT == 0:
                self.verifier.judge(solution, out, self.verifier.variant(0), f"at call {number} in a row")
            del out
            if number % 32 == 0:
                if first.is_cuda:
                    torch.cuda.synchronize(first.device)
                if clock() > until:
                    break

    def _call_from_threads(self, solution: Solution, launcher: Launcher) -> None:
        """Call the launcher from two concurrent threads on a CPU, one in inference mode.

        On a GPU this is slow, because of streams and handles; the conformance suite covers it.
        """
        if self._operands[0].is_cuda:
            return
        variants, start = (self.verifier.variant(1), self._elsewhere), threading.Barrier(2)

        def calls(index: int) -> list[torch.Tensor]:
            start.wait(timeout=60)
            with torch.inference_mode(index == 0), torch.no_grad():
                return [launcher.call(*variants[index].operands) for _ in range(THREADED)]

        with ThreadPoolExecutor(2) as pool:
            for variant, outs in zip(variants, pool.map(calls, range(2)), strict=True):
                for out in outs:
                    self.verifier.judge(solution, out, variant, "when two threads call")

    @property
    def _elsewhere(self) -> Variant:
        """Return a variant with other activations at other addresses."""
        renewed = self.verifier.variant(0, renewed=True)
        others = zip(self._operands, self.verifier.renewed(), strict=False)
        given = tuple(now if index in self.verifier.op.weights else other for index, (now, other) in enumerate(others))
        return attrs.evolve(renewed, operands=given, change=None, expected=self.verifier.expected(renewed))

    def _variants(self) -> Iterator[Variant]:
        yield from self._fewer_rows()
        yield from self._other_forms()
        yield from self._bias_dtypes()
        yield from Changes(self.verifier).variants()

    def _fewer_rows(self) -> Iterator[Variant]:
        """Yield calls of smaller M that this row serves."""
        op, shape = self.verifier.op, self.verifier.shape
        least = max(1, min(shape.m // 2 + 1, shape.m - 127))
        tried = sorted({*range(least, shape.m, max(1, shape.m // PART)), *range(max(least, shape.m - 8), shape.m)})
        served = [m for m in tried if shape.m in serving(op.padded_m, m, shape.n, self.device.kind)]
        draw = random.Random(str(shape))
        whole_tiles = [m for m in served[1:-1] if m % 16 == 0] or [m for m in served[1:-1] if m % 4 == 0]
        between = draw.sample(whole_tiles, min(1, len(whole_tiles))) + draw.sample(served[1:-1], min(FEWER_ROWS - 3, len(served[1:-1])))
        for m in dict.fromkeys([*served[-1:], *served[:1], *between]):
            cut = op.first_rows(shape, self._operands, m)
            width = self._expected.shape[-1]
            expected = self._expected.reshape(-1, shape.m, width)[:, :m].reshape(-1, width)
            yield Variant(f"at M = {m}", self._shape_of(cut), cut, expected=expected)

    def _other_forms(self) -> Iterator[Variant]:
        """Yield the operands with other leading dimensions, and inside larger buffers."""
        shape = self.verifier.shape
        for form in foldings(self.verifier.op, shape, self._operands):
            yield Variant(f"for x {tuple(form[0].shape)}", shape, form, expected=self._expected)
        for number, form in enumerate(other_forms(self.verifier.op, shape, self._operands)):
            yield Variant(f"with scales or a bias of another form ({number + 1})", shape, form, expected=self._expected)
        inside = tuple(None if operand is None else moved(operand) for operand in self._operands)
        yield Variant("for operands that begin inside their storage", shape, inside, expected=self._expected)

    def _bias_dtypes(self) -> Iterator[Variant]:
        """Yield the biases in each dtype, which rows do not distinguish."""
        operands, names = self._operands, self.verifier.op.operands
        positions = [index for index, each in enumerate(operands) if each is not None and names[index].startswith("bias")]
        for name in BIAS_DTYPES if positions else ():
            given = list(operands)
            for at in positions:
                bias = operands[at].to(torch.bfloat16)
                bias = torch.where(bias.abs() < 2.0**-10, torch.zeros_like(bias), bias)  # float16 represents the rest exactly
                given[at] = bias.to(torch_dtype(name))
            with contextlib.suppress(OperandError):
                yield Variant(f"with a bias in {name}", self._shape_of(tuple(given)), tuple(given))

    def _shape_of(self, operands: tuple[Any, ...]) -> Shape:
        op, shape = self.verifier.op, self.verifier.shape
        return op.shape_of(*operands, otype=torch_dtype(shape.outdtype), **op.fields(shape))
