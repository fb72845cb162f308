"""Launch a kernel on the emulator."""

from __future__ import annotations

import random

import attrs

from .instructions import step
from .machine import Machine, read
from .memory import Memory


@attrs.frozen
class Launch:
    """CTAs, bytes of shared memory and arguments, and the number of resident clusters, 0 for all."""

    grid: int
    shared: int
    arguments: bytes
    resident: int = 0


def run(text: str, launch: Launch, memory: Memory, seed: int = 0) -> None:
    """Run a kernel to its end.

    Raises:
        Fault: it did what must not be done, or came to no end.
    """
    machine = Machine(read(text), memory, launch.arguments, random.Random(seed))
    machine.start(launch.grid, launch.shared, launch.resident)
    machine.run(step)
