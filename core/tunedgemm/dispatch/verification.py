"""Verify a share of the served calls against torch's own call (``TUNEDGEMM_VERIFY``).

The device compares; the result is read at a later call, so that no call waits for the device. A
solution with a wrong output is vetoed in this process, and denied in the user's deny list.
"""

from __future__ import annotations

import collections
import datetime
import logging
import random
from typing import Any

import attrs
import torch

from tunedgemm.backends.backend import Backend
from tunedgemm.backends.split_bias import without_add
from tunedgemm.device import Device
from tunedgemm.dispatch.cache import Served
from tunedgemm.dispatch.call import Call
from tunedgemm.dispatch.captures import capture_check
from tunedgemm.errors import PluginError, TableError
from tunedgemm.libtypes import BUILTIN
from tunedgemm.ops.accuracy import MAX_ERROR_RATIO, measure
from tunedgemm.ops.op import Function
from tunedgemm.process.memory import is_out_of_memory
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.deny import Denial, add_denial, user_list

_log = logging.getLogger("tunedgemm")

#: Elements compared at a time: 40 MiB of temporaries, since an engine leaves little memory.
_CHUNK = 1 << 20
#: Calls between two looks at a comparison that the device has not finished.
_SOON = 32


def with_samples(dispatcher: Any, launcher: Function, call: Call, solution: Solution | None) -> Function:
    """Wrap a launcher so that the first call and then a random share of its calls are verified.

    Returns the launcher unchanged if torch serves.
    """
    share: float = dispatcher.settings.verify
    if solution is None or solution.libtype == BUILTIN:
        return launcher
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
        ask = capture_check(operands[0]) if operands[0] is not None else None
        if ask is not None and ask():  # torch would be captured, too; the next eager call is sampled
            left[0] = 1
            return self.launcher(*operands)
        if self.pending:
            left[0] = self._gap() if self._read() else _SOON
            return self.launcher(*operands)
        out = self.launcher(*operands)
        left[0] = self._gap()
        try:
            if (errors := self._compared(out, operands)) is not None:
                left[0] = min(left[0], _SOON)
                self._keep(errors)
        except Exception as error:  # torch may refuse what the kernel computes, and memory may run out
            if not is_out_of_memory(error):
                _log.warning("%s: calls cannot be verified: torch raised %s", self.shape, error)
                left[0] = 1 << 62
        return out

    def _gap(self) -> int:
        """Draw the calls up to the next sample."""
        return 1 + int(random.expovariate(self.share)) if self.share < 1 else 1

    def _compared(self, out: torch.Tensor, operands: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
        """Return the errors of an output on its device: ratio, worst row, both finite, torch finite."""
        with torch.no_grad():
            expected = self.dispatcher.torch_fallback(self.shape, self.device)(*operands)
            errors: torch.Tensor | None = measure(out, expected, self.dispatcher.op.tolerance(self.shape), _CHUNK)
            if errors is None:
                self._fail(f"size {list(out.shape)}, torch's is {list(expected.shape)}")
                return None
            return torch.cat([errors, expected.isfinite().all().double().view(1)])

    def _keep(self, errors: torch.Tensor) -> None:
        """Judge errors on the host at once, and others after the device has copied them."""
        if not errors.is_cuda:
            self._judge(errors)
            return
        host = torch.empty(errors.shape, dtype=errors.dtype, pin_memory=True)
        host.copy_(errors, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self.pending.append((host, event))

    def _read(self) -> bool:
        """Judge the pending comparison if the device has finished it; return whether it has."""
        errors, event = self.pending[0]
        if not event.query():
            return False
        self.pending.clear()
        self._judge(errors)
        return True

    def _judge(self, errors: torch.Tensor) -> None:
        """Veto and deny the solution if its errors exceed the tolerance and torch's output is finite."""
        ratio, worst, finite, usable = errors.tolist()
        bound = 2 * self.dispatcher.op.tolerance(self.shape).row_error  # torch's own error counts, too
        if usable and not (finite and ratio <= MAX_ERROR_RATIO and worst <= bound):
            off = f"{ratio:.2%} of the elements are outside the tolerance, and a row is off by {worst:.3g} of its norm"
            self._fail(off if finite else "values are not finite")

    def _fail(self, fault: str) -> None:
        served = Served(self.launcher, self.shape, self.device.index, self.solution)
        self.dispatcher.veto(served, PluginError(f"a verified call differs from torch's: {fault}"))
        kernel = without_add(self.solution)
        backend = self.dispatcher.registry.get(kernel.libtype)
        version = backend.library_version(self.device) if isinstance(backend, Backend) else ""
        texts = self.dispatcher.op.columns.format(self.shape)
        fields = tuple((column, texts[column]) for column in self.dispatcher.op.columns.key if texts.get(column))
        today = datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat()
        denial = Denial(
            self.shape.op, fields, kernel.libtype, kernel.kernel_name, version, self.device.gfx, str(self.device.cu_num),
            f"a verified call: {fault}", today,
        )  # fmt: skip
        try:
            add_denial(user_list(), denial)
        except TableError as error:
            _log.warning("%s: the kernel is denied in this process alone: %s", self.shape, error)
