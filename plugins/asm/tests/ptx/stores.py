"""Emulate TMA stores: shared memory is read later, and the output is written later still. PTX ISA,
"Async proxy": TMA sees the writes of threads that fenced and then synchronized with the issuing
thread. A buffer may be written again after that thread has waited for its group and synchronized.
"""

from __future__ import annotations

import re
from typing import Any

import attrs
import numpy as np

from .machine import LANES, Instruction, Machine, Unit
from .memory import Fault, Leaving, put_box, row_bytes_of, swizzled
from .waiting import Blocked, only, whole

#: Rows of a matrix of `stmatrix`, their bytes, and bytes of all banks.
_ROWS, _ROW_BYTES, _BANKS = 8, 16, 128


@attrs.define
class Stores:
    """TMA stores of one thread: an open group, and committed groups from the oldest."""

    opened: list[Leaving] = attrs.field(factory=list)
    groups: list[list[Leaving]] = attrs.field(factory=list)


def matrices(machine: Machine, unit: Unit, i: Instruction, mask: np.ndarray, told: Any) -> None:
    """Execute ``stmatrix`` of four matrices."""
    (at, braced), value = told
    whole(unit, mask)
    registers = [value(machine, unit, each) for each in braced.strip("{}").replace(" ", "").split(",")]
    for warp in range(0, LANES, 32):
        for number, register in enumerate(registers):
            lanes = range(warp + _ROWS * number, warp + _ROWS * (number + 1))
            if len({int(at[lane]) % _BANKS // _ROW_BYTES for lane in lanes}) < _ROWS:
                raise Fault("rows of a matrix share banks, which costs time")
            for row, lane in enumerate(lanes):
                if int(at[lane]) % _ROW_BYTES:
                    raise Fault(f"a row at {int(at[lane])} of shared memory, which is no multiple of {_ROW_BYTES}")
                content = register[warp + 4 * row : warp + 4 * (row + 1)].view(np.uint8)
                unit.block.shared.put(int(at[lane]), content, unit.group * LANES + lane)


def fence(machine: Machine, unit: Unit, i: Instruction, mask: np.ndarray, told: Any) -> None:
    """Execute ``fence.proxy.async`` for the active threads."""
    unit.block.shared.fence(unit.group * LANES + np.flatnonzero(mask))


def store(machine: Machine, unit: Unit, i: Instruction, mask: np.ndarray, told: Any) -> None:
    """Store a box from shared memory to an output."""
    (target, source), value = told
    lane, shared = int(np.flatnonzero(mask)[0]), unit.block.shared
    map_at, column, row = (only(mask, value(machine, unit, each)) for each in re.findall(r"%\w+", target))
    offset, begin = map_at - (1 << 60), only(mask, source)
    if offset % 64:
        raise Fault(f"a descriptor at byte {offset} of the arguments")
    descriptor = machine.arguments[offset : offset + 128]
    width, rows = row_bytes_of(descriptor)
    if begin % (8 * width):
        raise Fault(f"a box at {begin} of shared memory, whose swizzle starts at multiples of {8 * width}")
    entry = shared.leave(begin, begin + width * rows, (unit.group * LANES, LANES), unit.group * LANES + lane)
    unit.stores.setdefault(lane, Stores()).opened.append(entry)
    places = swizzled(begin + np.arange(width * rows), width)

    def read() -> None:
        content, entry.read = shared.content[places].copy(), True
        machine.stores.append(lambda: put_box(machine.memory, descriptor, (column, row), content))

    machine.stores.append(read)


def commit(machine: Machine, unit: Unit, i: Instruction, mask: np.ndarray, told: Any) -> None:
    """Commit the stores since the last group."""
    for lane in np.flatnonzero(mask):
        own = unit.stores.setdefault(int(lane), Stores())
        own.groups.append(own.opened)
        own.opened = []


def wait_read(machine: Machine, unit: Unit, i: Instruction, mask: np.ndarray, told: Any) -> None:
    """Wait until all but the last groups of a thread were read."""
    for lane in np.flatnonzero(mask):
        own = unit.stores.setdefault(int(lane), Stores())
        older = own.groups[: max(0, len(own.groups) - int(i.operands[0]))]
        if not all(entry.read for group in older for entry in group):
            raise Blocked
        for entry in (entry for group in older for entry in group):
            entry.waited = True
        del own.groups[: len(older)]
