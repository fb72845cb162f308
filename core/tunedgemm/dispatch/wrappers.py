"""Launcher wrappers: device guard, copies of operands, and graph captures."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from tunedgemm.device import Device
from tunedgemm.dispatch.call import Call, in_memory, is_ready
from tunedgemm.errors import OperandError
from tunedgemm.ops.formats.tensor_bytes import duplicate
from tunedgemm.ops.op import Function, Op


@attrs.frozen(eq=False)
class OnDevice:
    """Device guard around a launcher.

    torch's own ops need none, but a kernel launched through the driver goes to a stream of the
    current device.
    """

    launcher: Function
    index: int

    def __call__(self, *operands: Any) -> torch.Tensor:
        """Run the launcher with its device current."""
        with torch.cuda.device(self.index):
            return self.launcher(*operands)


def is_elsewhere(device: Device) -> bool:
    """Check whether the current GPU is not *device*."""
    return device.index >= 0 and torch.cuda.current_device() != device.index


def adapted(
    call: Call, launcher: Function, native: Function | None, *, breaks_capture: bool, is_torch: bool, keeps_bits: bool = False
) -> Function:
    """Wrap a launcher for operands that need a copy, or because it breaks graph captures.

    Args:
        call: the first call of the key; later calls have equal alignment and contiguity.
        launcher: the launcher.
        native: torch's implementation; None if there is none.
        breaks_capture: whether the launcher cannot be captured.
        is_torch: whether the launcher is the built-in backend's.
        keeps_bits: whether torch's bits differ from the launcher's class, so that weights are
            copied, too.
    """
    launcher = eager_only(launcher, native) if breaks_capture and native is not None else launcher
    if call.is_ready:
        return launcher
    if keeps_bits:
        return _copying(call.op, launcher, None)
    if native is not None and any(operand is not None and operand.element_size() == 1 for operand in call.operands):
        native = _copying(call.op, native, None)  # torch's 8-bit GEMMs need contiguous, aligned operands, too
    return native if native and is_torch else _copying(call.op, launcher, native)


def eager_only(launcher: Function, native: Function) -> Function:
    """Wrap a launcher that breaks graph captures, so that torch serves calls during one."""
    capturing = torch.cuda.is_current_stream_capturing

    def eager(*operands: torch.Tensor | None) -> torch.Tensor:
        return native(*operands) if capturing() else launcher(*operands)

    return eager


def _copying(op: Op, launcher: Function, native: Function | None) -> Function:
    """Wrap a launcher to copy activations to contiguous, aligned memory.

    Torch's call *native* serves if a weight would need a copy in each call. Without it, weights
    are copied, too.
    """
    weights, strided = op.weights if native is not None else (), op.strided

    def ready(index: int, operand: torch.Tensor | None) -> torch.Tensor | None:
        keeps = index in strided
        return operand if operand is None or is_ready(operand, keeps) else duplicate(operand, contiguous=not keeps)

    def copied(*operands: torch.Tensor | None) -> torch.Tensor:
        if not in_memory(operands):  # such operands share the keys of misaligned ones
            raise OperandError("the memory of an operand does not hold its values; pass a copy")
        if native is not None and not all(is_ready(operands[index]) for index in weights if index < len(operands)):
            return native(*operands)
        return launcher(*(ready(index, operand) for index, operand in enumerate(operands)))

    return copied
