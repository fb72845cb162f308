"""Stage 7, served: is all that the winner's row serves right, beyond the call that was timed?

The row of M = 64 serves calls of fewer rows, with any leading dimensions and bias dtypes. It serves
after weights were updated in place, too, and for as long as the process lives. ``docs/tuning.md``
lists what stays undetected.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import torch

from tunedgemm.backends.launcher import Launcher
from tunedgemm.backends.registry import Backend
from tunedgemm.device import Device
from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import OperandError
from tunedgemm.ops.formats.contents import moved, overwrite
from tunedgemm.ops.formats.shuffle import plain_weight
from tunedgemm.ops.padded_m import serving
from tunedgemm.ops.quantised import BIAS_DTYPES
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported
from tunedgemm.timing import Timing
from tunedgemm.tuner.foldings import foldings
from tunedgemm.tuner.trial import failed
from tunedgemm.tuner.verify import Variant, Verifier, worse_of
from tunedgemm.tuner.watching import dispatched, swallowed_exceptions

#: Outputs that are alive at the same time, fewer where they take more bytes than these.
WINDOW, WINDOW_BYTES = 16, 1 << 30
#: Calls in a row, the seconds after which there are no more, and which outputs are looked at.
CALLS, SECONDS, LOOKED_AT = 1100, 0.05, 7
#: Calls from each of two threads at once.
THREADED = 4
#: Smaller M that are tried: the least, the largest, and some between.
FEWER_ROWS = 4
#: Share of an operand's contents that changes at once.
PART = 256
#: Largest binary exponent by which rows of the activations are scaled, either way.
EXPONENT = 40

Bind = Callable[[Shape], Launcher | Unsupported]


def as_dispatch_binds(backend: Backend, solution: Solution, device: Device) -> Bind:
    """Return the function that binds a solution to a shape where its backend supports that."""

    def bind(shape: Shape) -> Launcher | Unsupported:
        answer = backend.supports(shape, device, solution)
        return answer if isinstance(answer, Unsupported) else backend.bind(solution, shape, device)

    return bind


@attrs.frozen(eq=False)
class Served:
    """Checks of one shape, for its winner.

    Attributes:
        verifier: operands and references of the shape.
        device: the device.
        baseline: torch's own call; None where it does not run.
    """

    verifier: Verifier
    device: Device
    baseline: Launcher | None

    def check(self, solution: Solution, launcher: Launcher, bind: Bind, *, is_torchs: bool = False) -> Timing:
        """Verify everything that a row of this solution serves.

        Args:
            solution: the solution.
            launcher: its launcher for the shape.
            bind: returns its launcher at another M or bias dtype.
            is_torchs: whether this is a route of torch.

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
            if isinstance(bound, Unsupported):  # dispatch asks the next row then
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
        """Return the reference of the first operands."""
        return self.verifier.expected(self.verifier.variant(0))

    @property
    def _window(self) -> int:
        size = self._expected.numel() * torch_dtype(self.verifier.shape.outdtype).itemsize
        return max(3, min(WINDOW, WINDOW_BYTES // max(1, size)))

    def _substitution_fault(self, launcher: Launcher, bind: Bind) -> str:
        """Return that torch's own call took the place of a kernel that failed, "" if it did not.

        Two signs together show it. Torch dispatches the same operations as for its own call, and
        Python code of the backend swallows an exception when it binds or launches.
        """
        if self.baseline is None or dispatched(launcher, self._operands) != dispatched(self.baseline, self._operands):
            return ""
        swallowed: list[str] = []
        with swallowed_exceptions(swallowed), torch.no_grad():
            bound = bind(self.verifier.shape)
            (launcher if isinstance(bound, Unsupported) else bound).call(*self._operands)
        return f"it ran torch's own call after its kernel failed: {swallowed[0]}" if swallowed else ""

    def _call_often(self, solution: Solution, launcher: Launcher) -> None:
        """Call the launcher many times and look at some outputs; the checks that follow see what that changed."""
        first = self._operands[0]
        clock = time.monotonic if first.is_cuda else time.thread_time  # other processes do not shorten the check
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
        """Call the launcher from two other threads of a CPU at once, the first in inference mode.

        Streams and handles of a GPU make this slow there; the conformance suite checks threads.
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
        """Return other activations, at other addresses than those of the sets."""
        renewed = self.verifier.variant(0, renewed=True)
        others = zip(self._operands, self.verifier.renewed(), strict=False)
        given = tuple(now if index in self.verifier.op.weights else other for index, (now, other) in enumerate(others))
        return attrs.evolve(renewed, operands=given, change=None, expected=self.verifier.expected(renewed))

    def _variants(self) -> Iterator[Variant]:
        yield from self._fewer_rows()
        yield from self._other_forms()
        yield from self._bias_dtypes()
        yield from self._other_contents()

    def _fewer_rows(self) -> Iterator[Variant]:
        """Yield calls of fewer rows that the row of this shape serves."""
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
        inside = tuple(None if operand is None else moved(operand) for operand in self._operands)
        yield Variant("for operands that begin inside their storage", shape, inside, expected=self._expected)

    def _bias_dtypes(self) -> Iterator[Variant]:
        """Yield the bias in each dtype: rows do not tell them apart."""
        operands, shape = self._operands, self.verifier.shape
        at = self.verifier.op.operands.index("bias?") if shape.bias and "bias?" in self.verifier.op.operands else len(operands)
        if at >= len(operands) or operands[at] is None:
            return
        bias = operands[at].to(torch.bfloat16)
        bias = torch.where(bias.abs() < 2.0**-10, torch.zeros_like(bias), bias)  # float16 holds all others exactly
        for name in BIAS_DTYPES:
            given = (*operands[:at], bias.to(torch_dtype(name)), *operands[at + 1 :])
            with contextlib.suppress(OperandError):
                yield Variant(f"with a bias in {name}", self._shape_of(given), given)
        with contextlib.suppress(OperandError):
            given = (*operands[:at], operands[at].unsqueeze(-2), *operands[at + 1 :])
            yield Variant(f"with a bias {tuple(given[at].shape)}", self._shape_of(given), given, expected=self._expected)

    def _other_contents(self) -> Iterator[Variant]:
        """Yield other contents at the same addresses: all, parts, rows of other sizes, NaN, the first again."""
        shape, operands, other = self.verifier.shape, self._operands, self.verifier.operand_sets[1]
        expected = self.verifier.expected(self.verifier.variant(1))
        yield Variant("after weights changed in place", shape, operands, lambda now: _replace(now, other), expected)
        for place in range(2):
            change = functools.partial(self._replace_part, place=place)
            yield Variant(f"after a part of the operands changed in place ({place + 1})", shape, operands, change)
        if self._exponents != (0, 0):
            for first, what in enumerate(("large", "small")[: 2 if shape.m == 1 else 1]):
                change = functools.partial(self._scale_rows, first=first)
                yield Variant(f"with rows of very different size, the first {what}", shape, operands, change, by_row=True)
        if self._between:
            for exponent in (self._between, -self._between):
                change = functools.partial(self._shift_size, exponent=exponent)
                yield Variant(f"with weights 2^{exponent} times as large, and x as much smaller", shape, operands, change)
        if self._spoilt is not None:
            for value in (math.nan, math.inf)[: 1 if shape.m > 2 or operands[self._spoilt].dtype in _NAN_BYTES else 2]:
                change = functools.partial(self._spoil_rows, value=value)
                yield Variant(f"with {value} in a row", shape, operands, change, spoiled=True)
            yield Variant("with NaN in a weight", shape, operands, self._spoil_weights, spoiled=True)
        yield Variant("after all of this", shape, operands, expected=self._expected)

    def _shape_of(self, operands: tuple[Any, ...]) -> Shape:
        op, shape = self.verifier.op, self.verifier.shape
        return op.shape_of(*operands, otype=torch_dtype(shape.outdtype), **op.fields(shape))

    def _replace_part(self, now: tuple[Any, ...], place: int) -> None:
        """Give a small part of each operand other contents, which a key of sampled contents misses.

        At the second place, it makes one element of a weight in floats large.
        """
        draw = random.Random(f"{self.verifier.shape} {place}")
        for position, operand in enumerate(now):
            if operand is None:
                continue
            source = self.verifier.operand_sets[1] if position in self.verifier.op.weights else self.verifier.renewed()
            target, new = plain_weight(operand), plain_weight(source[position])
            if not target.is_contiguous() or not target.dim() or target.dtype in (torch.int32, torch.int64):  # indices hang together
                overwrite(target, new)
                continue
            if place and position in self.verifier.op.matrices and target.dtype.is_floating_point and target.dtype.itemsize > 1:
                shape = self.verifier.shape
                size = min(4096.0, math.sqrt(shape.n * shape.k))
                at = draw.randrange(target.numel())
                target.data.view(-1)[at] = -size if target.view(-1)[at] > 0 else size
                continue
            part = max(1, target.numel() // PART)
            start = draw.randrange(target.numel() - part + 1)
            overwrite(target.view(-1)[start : start + part], new.contiguous().view(-1)[start : start + part])

    @functools.cached_property
    def _scaled(self) -> int | None:
        """Return the position of an activation in 16 bits or more that scales the output, if any."""
        return self._activation(lambda dtype: dtype.is_floating_point and dtype.itemsize > 1)

    @functools.cached_property
    def _spoilt(self) -> int | None:
        """Return the position of an activation whose dtype has NaN."""
        return self._activation(lambda dtype: dtype in _NAN_BYTES or (dtype.is_floating_point and dtype.itemsize > 1))

    def _activation(self, fits: Callable[[torch.dtype], bool]) -> int | None:
        op = self.verifier.op
        given = [position for position, operand in enumerate(self._operands) if operand is not None and position not in op.weights]
        floats = torch_dtype(self.verifier.shape.outdtype).is_floating_point and op.is_linear
        activations = [position for position in given if not op.operands[position].startswith("bias")]
        return next((position for position in activations if floats and fits(self._operands[position].dtype)), None)

    @functools.cached_property
    def _exponents(self) -> tuple[int, int]:
        """Return binary exponents by which rows may shrink and grow, as far as dtypes hold the values."""
        if self._scaled is None or not self._expected.numel():
            return 0, 0
        lows, highs = [-EXPONENT], [EXPONENT]
        out = torch.finfo(torch_dtype(self.verifier.shape.outdtype))
        operand = self._operands[self._scaled]
        for values, info in ((self._expected, out), (operand, torch.finfo(operand.dtype))):
            most = math.log2(max(float(values.abs().max()), info.tiny))
            highs.append(math.floor(math.log2(info.max) - most) - 4)
            lows.append(math.ceil(math.log2(info.tiny) - most) + 14)
        return min(0, max(lows)), max(0, min(highs))

    @functools.cached_property
    def _between(self) -> int:
        """Return the binary exponent that may go from x to the weights or back; 0 where dtypes hold none."""
        weights = [self._operands[index] for index in self.verifier.op.matrices]
        if self._scaled is None or not all(each.dtype.is_floating_point and each.dtype.itemsize > 1 for each in weights):
            return 0
        most = EXPONENT
        for operand in (self._operands[self._scaled], *weights):
            info = torch.finfo(operand.dtype)
            size = math.log2(max(float(plain_weight(operand).abs().max()), info.tiny))
            up, down = math.log2(info.max) - size - 1, size - math.log2(info.tiny) - 14
            most = min(most, math.floor(up), math.floor(down))
        return max(0, most)

    def _shift_size(self, now: tuple[Any, ...], exponent: int) -> None:
        """Scale weights by a power of two, x by its inverse: kernels that clamp weights differ."""
        assert self._scaled is not None, "asked for by _between"
        now[self._scaled].data.mul_(2.0**-exponent)
        for index in self.verifier.op.matrices:
            plain_weight(now[index]).data.mul_(2.0**exponent)

    def _scale_rows(self, now: tuple[Any, ...], first: int) -> None:
        """Scale each row by a power of two; a kernel that clamps, or rounds at a fixed scale, differs."""
        assert self._scaled is not None, "asked for by _exponents"
        low, high = self._exponents
        operand, m = now[self._scaled], self.verifier.shape.m
        draw = random.Random(str(self.verifier.shape))
        exponents = [*((low, high) if first else (high, low)), *(draw.randint(low, high) for _ in range(m - 2))][:m]
        factors = torch.tensor([2.0**each for each in exponents], dtype=operand.dtype, device=operand.device)
        by_row = operand.dim() >= 2 and operand.shape[-2] == m
        operand.data.mul_(factors[:, None] if by_row else factors[0])

    def _spoil_rows(self, now: tuple[Any, ...], value: float) -> None:
        """Put the value into one row; of three or more, put infinity into another, too."""
        assert self._spoilt is not None, "asked for by _other_contents"
        operand, m = now[self._spoilt], self.verifier.shape.m
        if operand.dim() < 2 or operand.shape[-2] != m:
            operand.data.fill_(value)
            return
        row = m // 2
        if operand.dtype in _NAN_BYTES:
            operand.view(torch.uint8)[..., row, -1] = _NAN_BYTES[operand.dtype]
            return
        operand.data[..., row, -1] = value
        if m > 2:
            operand.data[..., m - 1, operand.shape[-1] // 3] = math.inf

    def _spoil_weights(self, now: tuple[Any, ...]) -> None:
        """Put NaN into one element of each weight proper, and into one of the bias."""
        op = self.verifier.op
        for index, operand in enumerate(now):
            if operand is None or not (index in op.matrices or op.operands[index].startswith("bias")):
                continue
            plain = plain_weight(operand).data
            if plain.dtype in _NAN_BYTES:
                plain.view(torch.uint8).view(-1)[plain.numel() // 2] = _NAN_BYTES[plain.dtype]
            elif plain.dtype.is_floating_point and plain.dtype.itemsize > 1:
                plain.view(-1)[0 if operand.dim() == 1 else plain.numel() // 2] = math.nan


#: NaN in the dtypes of one byte that hold it.
_NAN_BYTES = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7F, torch.float8_e4m3fnuz: 0x80, torch.float8_e5m2fnuz: 0x80}


def _replace(now: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    for operand, source in zip(now, other, strict=True):
        if operand is not None:
            overwrite(operand, source)
