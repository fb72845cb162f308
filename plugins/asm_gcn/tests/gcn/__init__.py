"""Emulate AMDGCN text (gfx942, gfx950) on numpy, 64 lanes at a time. It runs what LLVM's assembler
reads and its disassembler prints. It is stricter than hardware: behaviour that a program may not
rely on is an error (`fault.Fault`) that names the line.
"""

from __future__ import annotations

from . import newer, numbers
from .bench import Bench
from .fault import Fault
from .kernel import Kernel, arguments, kernels_of
from .launch import Rules, Run, launch
from .memory import Memory
from .text import parse

__all__ = ["Bench", "Fault", "Kernel", "Memory", "Rules", "Run", "arguments", "kernels_of", "launch", "newer", "numbers", "parse"]
