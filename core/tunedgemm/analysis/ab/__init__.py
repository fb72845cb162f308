"""Two arms in turns on one machine, with an A/A control: a command, or kernels over a list of shapes."""

from __future__ import annotations

from tunedgemm.analysis.ab.command import Arm, Failure, run_command
from tunedgemm.analysis.ab.kernels import compare_kernels
from tunedgemm.analysis.ab.turns import FEWEST_TURNS, Result, take_turns

__all__ = ["FEWEST_TURNS", "Arm", "Failure", "Result", "compare_kernels", "run_command", "take_turns"]
