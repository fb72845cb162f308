"""Model one wave: registers, defined lanes, pending loads and wait states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

from .fault import Fault
from .text import ACCUMULATION, VECTOR, Instruction, Register

LANES = 64
VCC, M0, EXEC = 106, 124, 126
ALL = (1 << LANES) - 1
_BITS = np.arange(LANES, dtype=np.uint64)


def lanes_of(mask: int) -> np.ndarray:
    """Return the lanes of a 64-bit mask as booleans."""
    return ((np.uint64(mask) >> _BITS) & np.uint64(1)).astype(bool)


def mask_of(lanes: np.ndarray) -> int:
    """Return the 64-bit mask of booleans."""
    return int(np.packbits(lanes, bitorder="little").view(np.uint64)[0])


@attrs.define(eq=False)
class Outstanding:
    """A pending memory instruction: ``order`` groups those that complete in order, ``finish``
    completes it.
    """

    instruction: Instruction
    order: str
    keys: tuple[int, ...]
    finish: Callable[[], None] | None


@attrs.define(eq=False)
class Stored:
    """A store of more than 64 bits: registers, issue time and required wait states."""

    keys: frozenset[int]
    time: int
    states: int


class Wave:
    """A wave of 64 lanes."""

    def __init__(self, group: Any, number: int, budget: int) -> None:
        self.group = group
        self.number = number
        self.budget = budget
        self.s: list[int | None] = [None] * 128
        self.v = np.zeros((512, LANES), np.uint32)
        self.f = self.v.view(np.float32)
        self.defined = np.zeros((512, LANES), bool)
        self.known = bytearray(ACCUMULATION + 256)
        self.scc: int | None = None
        self.lanes = np.ones(LANES, bool)
        self.all_lanes = True
        self.pc = 0
        self.time = 0
        self.ended = False
        self.waiting = False
        self.vector_memory: list[Outstanding] = []
        self.lds_and_scalar: list[Outstanding] = []
        self.pending: dict[int, Outstanding] = {}
        #: Of the rules on wait states, by register key: what wrote or read it last, see `hazards`.
        self.written: dict[int, tuple[int, str]] = {}
        self.products: dict[int, Any] = {}
        self.addends: dict[int, tuple[int, int]] = {}
        self.stored: list[Stored] = []
        #: When a scalar instruction wrote M0.
        self.base_time = -100
        #: When this wave last invalidated what it may have cached of other workgroups' writes.
        self.invalidated = -1
        self.scalar_invalidated = -1
        self.put64(EXEC, ALL)

    # --- scalar registers

    def get(self, key: int) -> int:
        """Return a scalar register; raise where it is undefined."""
        found = self.s[key]
        if found is None:
            raise Fault("undefined", f"scalar register s{key} was never written")
        return found

    def get64(self, key: int) -> int:
        return self.get(key) | (self.get(key + 1) << 32)

    def put(self, key: int, value: int) -> None:
        self.s[key] = value & 0xFFFFFFFF
        self.known[key] = 1
        if key >= EXEC:
            self._lanes()

    def put64(self, key: int, value: int) -> None:
        self.s[key] = value & 0xFFFFFFFF
        self.s[key + 1] = (value >> 32) & 0xFFFFFFFF
        self.known[key] = self.known[key + 1] = 1
        if key >= EXEC:
            self._lanes()

    def _lanes(self) -> None:
        mask = (self.s[EXEC] or 0) | ((self.s[EXEC + 1] or 0) << 32)
        self.lanes = lanes_of(mask)
        self.all_lanes = mask == ALL

    # --- vector registers, by key

    def check(self, key: int, lanes: np.ndarray | None = None) -> None:
        """Raise where an active lane of a vector register is undefined."""
        if self.known[key]:
            return
        missing = (self.lanes if lanes is None else lanes) & ~self.defined[key - VECTOR]
        if missing.any():
            which = np.flatnonzero(missing)
            name = Register("v", key - VECTOR) if key < ACCUMULATION else Register("a", key - ACCUMULATION)
            raise Fault("undefined", f"{name} was never written in {len(which)} lanes, the first is {which[0]}")

    def write(self, key: int, value: Any, lanes: np.ndarray | None = None) -> None:
        """Write the active or given lanes of a vector register."""
        row = key - VECTOR
        if lanes is None and self.all_lanes:
            self.v[row] = value
            self.known[key] = 1
            return
        chosen = self.lanes if lanes is None else lanes
        np.copyto(self.v[row], value, where=chosen)
        if not self.known[key]:
            self.defined[row] |= chosen
            self.known[key] = bool(self.defined[row].all())
