"""Emulate the PTX that the generator writes, more strictly than hardware. Errors are: deadlocks,
stages overwritten while read, accumulators touched too early, addresses outside buffers, wrong
phases. Copies, wgmma and the choice of the next warpgroup complete in random order. Time is not
modelled.
"""

from .bench import Bench, mistake_shows
from .cuda import Cuda
from .formats import E4M3
from .launch import Launch, run
from .memory import Fault, Memory, Shared, described

__all__ = ["E4M3", "Bench", "Cuda", "Fault", "Launch", "Memory", "Shared", "described", "mistake_shows", "run"]
