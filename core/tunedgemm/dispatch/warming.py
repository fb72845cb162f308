"""Bind and run shapes one by one; a shape that cannot run does not stop the others."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from typing import Any

from tunedgemm.device import Device
from tunedgemm.ops.op import Function, Op
from tunedgemm.process.interrupt import is_interrupt
from tunedgemm.process.memory import is_out_of_memory
from tunedgemm.process.plugin_guard import described
from tunedgemm.shape import Shape

_log = logging.getLogger("tunedgemm")


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
