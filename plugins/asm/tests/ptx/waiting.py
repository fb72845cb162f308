"""Helpers of instructions that wait, or that one lane or all lanes execute."""

from __future__ import annotations

import numpy as np

from .machine import Unit
from .memory import Fault


class Blocked(Exception):
    """Signal that the instruction has to wait."""


def only(mask: np.ndarray, given: np.ndarray) -> int:
    """Return the value of the only active lane."""
    lanes = np.flatnonzero(mask)
    if len(lanes) != 1:
        raise Fault(f"{len(lanes)} lanes where one is meant")
    return int(given[lanes[0]])


def whole(unit: Unit, mask: np.ndarray) -> None:
    """Wait for the lanes that are further behind; check that all are active."""
    if mask.all():
        return
    if unit.at[~mask].min() < unit.at[mask].max():
        raise Blocked
    raise Fault("not all threads of the warp group are there")
