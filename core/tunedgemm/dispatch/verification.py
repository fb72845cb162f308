"""Verify a share of the served calls against torch's own call (``TUNEDGEMM_VERIFY``).

The device compares; the result is read at a later call, so that no call waits for the device. A
solution with a wrong output is vetoed in this process, and denied in the user's deny list.
"""

from __future__ import annotations

import collections
import logging
import math
import random
from typing import Any

import attrs
import torch

from tunedgemm.device import Device
from tunedgemm.dispatch.cache import Served
from tunedgemm.dispatch.call import Call
from tunedgemm.dispatch.captures import may_synchronize, watch_graphs
from tunedgemm.dispatch.counters import count
from tunedgemm.errors import PluginError, TableError
from tunedgemm.libtypes import BUILTIN
from tunedgemm.ops.accuracy import MAX_ERROR_RATIO
from tunedgemm.ops.op import Function, Tolerance
from tunedgemm.process.interrupt import is_interrupt
from tunedgemm.process.memory import is_out_of_memory
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.deny import Denial, add_denial, user_list

_log = logging.getLogger("tunedgemm")

#: Elements compared at a time: 40 MiB of temporaries, since an engine leaves little memory.
_CHUNK = 1 << 20
#: Calls between two looks at a comparison that the device has not finished.
_SOON = 32
#: Longest wait for the deny list's lock, in seconds, since it is in a call.
_LOCKED = 0.5
#: Draws the gaps between samples, without touching the state that users seed.
_random = random.Random()


def with_samples(dispatcher: Any, launcher: Function, call: Call, solution: Solution | None) -> Function:
    """Wrap a launcher so that the first call and then a random share of its calls are verified.

    Returns the launcher unchanged if torch serves.
    """
    share: float = dispatcher.settings.verify
    if solution is None or solution.libtype == BUILTIN:
        return launcher
    watch_graphs()  # a look at an event while another thread captures a graph would end the capture
    return _Samples(dispatcher, share, launcher, call.shape, call.device, solution).function()


@attrs.define(eq=False)
class _Samples:
    """The verified calls of one launcher.

    Attributes:
        dispatcher: the dispatcher.
        share: share of the calls.
        launcher: the launcher.
        shape, device, solution: what it was bound for.
        pending: comparisons that the device may not have finished: errors in the memory of the host
            and the event after which they are there.
    """

    dispatcher: Any
    share: float
    launcher: Function
    shape: Shape
    device: Device
    solution: Solution
    pending: collections.deque[tuple[torch.Tensor, torch.cuda.Event]] = attrs.field(factory=collections.deque, init=False)

    def function(self) -> Function:
        """Return the function to call instead of the launcher."""
        launcher, left = self.launcher, [1]

        def sampling(*operands: torch.Tensor | None) -> torch.Tensor:
            left[0] -= 1
            if left[0] > 0:
                return launcher(*operands)
            return self._sample(left, operands)

        return sampling

    def _sample(self, left: list[int], operands: tuple[torch.Tensor | None, ...]) -> torch.Tensor:
        """Run a call, and compare it unless an earlier comparison is still to be read."""
        if operands[0] is not None and not may_synchronize(operands[0]):
            left[0] = 1  # torch would be captured, too; the next eager call is sampled
            return self.launcher(*operands)
        left[0] = self._gap()
        out = self.launcher(*operands)
        try:
            if self.pending:
                left[0] = left[0] if self._read() else _SOON
            elif (errors := self._compared(out, operands)) is not None:
                self._keep(errors)
                left[0] = min(left[0], _SOON) if self.pending else left[0]
        except Exception as error:  # torch may refuse what the kernel computes, and memory may run out
            if is_interrupt(error):
                raise
            if not is_out_of_memory(error):
                _log.warning("%s: calls cannot be verified: torch raised %s", self.shape, error)
                left[0] = 1 << 62
        return out

    def _gap(self) -> int:
        """Draw the calls up to the next sample."""
        return 1 + int(_random.expovariate(self.share)) if self.share < 1 else 1

    def _compared(self, out: torch.Tensor, operands: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
        """Return the errors of an output on its device, see `errors_of`; fail on another size."""
        count("verifications", self.shape.op, self.solution.libtype)
        with torch.no_grad():
            expected = self.dispatcher.torch_fallback(self.shape, self.device)(*operands)
            if out.shape != expected.shape:
                self._fail(f"size {list(out.shape)}, torch's is {list(expected.shape)}")
            elif out.numel():
                return errors_of(out, expected, self.dispatcher.op.tolerance(self.shape))
        return None

    def _keep(self, errors: torch.Tensor) -> None:
        """Judge errors on the host at once, and others after the device has copied them."""
        if not errors.is_cuda:
            self._judge(errors)
            return
        host = torch.empty(errors.shape, dtype=errors.dtype, device="cpu", pin_memory=True)
        host.copy_(errors, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self.pending.append((host, event))

    def _read(self) -> bool:
        """Judge the oldest pending comparison if the device has finished it; return whether it has."""
        try:
            errors, event = self.pending.popleft()  # another thread may have taken it
        except IndexError:
            return True
        if not event.query():
            self.pending.appendleft((errors, event))
            return False
        self._judge(errors)
        return True

    def _judge(self, errors: torch.Tensor) -> None:
        """Veto and deny the solution if its errors exceed the tolerance."""
        ratio, worst = errors.tolist()
        bound = 2 * self.dispatcher.op.tolerance(self.shape).row_error  # torch's own error counts, too
        if ratio > MAX_ERROR_RATIO or worst > bound:
            off = f"{ratio:.2%} of the elements are outside the tolerance, and a row is off by {worst:.3g} of its norm"
            self._fail(off if math.isfinite(worst) else "values are not finite")

    def _fail(self, fault: str) -> None:
        served = Served(self.launcher, self.shape, self.device.index, self.solution)
        self.dispatcher.veto(served, PluginError(f"a verified call differs from torch's: {fault}"))
        version = self.dispatcher.registry.library_version(self.solution.libtype, self.device)
        fields = tuple((column, text) for column, text in self.dispatcher.op.columns.format(self.shape).items() if text)
        denial = Denial(
            self.shape.op, fields, self.solution.libtype, self.solution.kernel_name, str(self.solution.split_k), version,
            self.device.gfx, str(self.device.cu_num), f"a verified call: {fault}",
        )  # fmt: skip
        try:
            add_denial(user_list(), denial, timeout=_LOCKED)
        except TableError as error:
            _log.warning("%s: the kernel is denied in this process alone: %s", self.shape, error)


def errors_of(out: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance) -> torch.Tensor:
    """Return the share of elements outside the tolerance and the worst row's error, on their device.

    Rows without a finite expectation say nothing. A row counts only if one of its elements is
    outside, and its error is relative to at least the mean norm of rows: in a row that cancels,
    torch's own error is as large as the row.

    Args:
        out, expected: [..., N] of any dtypes, with at least one element.
        tolerance: the bounds of elements.
    """
    outs, refs = out.reshape(-1, out.shape[-1]), expected.reshape(-1, expected.shape[-1])
    step, parts = max(1, _CHUNK // out.shape[-1]), []
    for first in range(0, len(refs), step):
        ref = refs[first : first + step].double()
        usable = ref.isfinite().all(-1, keepdim=True)
        difference = torch.where(usable, outs[first : first + step].double() - ref, 0.0)
        ref = torch.where(usable, ref, 0.0)
        outside = ~(difference.abs() <= ref.abs() * tolerance.rtol + tolerance.atol)  # also where it is NaN
        norm = ref.norm(dim=-1)
        error = difference.norm(dim=-1) / torch.maximum(norm, norm.sum() / usable.sum())
        worst = error.nan_to_num(nan=math.inf, posinf=math.inf).where(outside.any(-1), 0.0).max()
        parts.append(torch.stack([outside.sum() / out.numel(), worst]))
    each = torch.stack(parts)
    return torch.stack([each[:, 0].sum(), each[:, 1].max()])
