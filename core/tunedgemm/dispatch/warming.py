"""Bind and run shapes one by one; a shape that cannot run does not stop the others."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from tunedgemm.device import Device, current_device
from tunedgemm.ops.op import Function, Op
from tunedgemm.process.interrupt import is_interrupt
from tunedgemm.process.memory import is_out_of_memory
from tunedgemm.process.plugin_guard import described
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    from tunedgemm.table.lookup import Table

_log = logging.getLogger("tunedgemm")


class Warming(Protocol):
    """The part of a dispatcher that `prewarm_shapes` uses."""

    op: Op

    @property
    def table(self) -> Table:
        """Return the merged table."""

    def warm(self, shape: Shape, device: Device) -> bool:
        """Bind and run a shape; return whether it ran."""


def prewarm_shapes(dispatcher: Warming, shapes: Iterable[Shape] | None = None, device: Device | None = None) -> int:
    """Bind and run each shape once, so that graphs can be captured; return how many ran.

    A shape that cannot run is logged and skipped.

    Args:
        dispatcher: the dispatcher of the op.
        shapes: the shapes to bind; by default those of all rows for this device.
        device: the device to bind for; by default the current one.
    """
    device = device or current_device()
    expected = (row.shape for row in dispatcher.table.rows_for(device) if row.shape.m > 0) if shapes is None else shapes
    return warm_each(dispatcher.op, dispatcher.warm, expected, device)


def warm_each(op: Op, warm: Callable[[Shape, Device], bool], shapes: Iterable[Shape], device: Device) -> int:
    """Warm each canonical shape once, and log those that cannot run.

    Args:
        warm: binds and runs a shape, and returns whether it ran.

    Returns:
        The number of shapes that ran.
    """
    count = 0
    for shape in dict.fromkeys(shapes):
        try:
            count += warm(op.as_asked(shape), device)
        except BaseException as error:  # a kernel of a plugin may raise anything
            if is_interrupt(error):
                raise
            _log.warning("%s is not prewarmed: %s", shape, described(error))
    return count


def random_operands(op: Op, shape: Shape, device: Device) -> tuple[Any, ...] | None:
    """Draw random operands of a shape; log why and return None if they cannot be made."""
    try:
        return _drawn(op, shape, device)
    except Exception as error:  # such as out of memory for all experts of a model
        _log.warning("%s is bound but was not run: its operands cannot be made: %s", shape, described(error))
        return None


def _drawn(op: Op, shape: Shape, device: Device) -> tuple[Any, ...]:
    """Draw operands; raise MemoryError where Linux would overcommit and kill the process."""
    if device.kind == "cpu" and op.bytes_moved(shape) > _memory():
        raise MemoryError("they are larger than the memory")
    return op.make_inputs(shape, device.torch_device, 0)


def has_memory(shape: Shape, launcher: Function, operands: tuple[Any, ...]) -> bool:
    """Run a call; log and return False if it runs out of memory."""
    try:
        launcher(*operands)
    except BaseException as error:  # a kernel of a plugin may raise anything
        if not is_out_of_memory(error):
            raise
        _log.warning("%s is bound but was not run: no memory: %s", shape, error)
        return False
    return True


def _memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
