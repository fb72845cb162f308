"""An emulator of the PTX that the generator writes, stricter than hardware.

Deadlocks, stages overwritten while they are read, sums touched before their instructions are done, addresses outside of buffers and
phases that do not fit are errors. It knows no time.

Everything asynchronous ends in a random order: copies, matrix instructions, and which warp group goes on next.
"""

from .bench import Bench, mistake_shows
from .cuda import Cuda
from .formats import E4M3
from .launch import Launch, run
from .memory import Fault, Memory, Shared, described

__all__ = ["E4M3", "Bench", "Cuda", "Fault", "Launch", "Memory", "Shared", "described", "mistake_shows", "run"]
