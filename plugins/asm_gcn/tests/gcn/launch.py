"""Run a grid: workgroups in any order, waves in turn from barrier to barrier."""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs
import numpy as np

from . import waits
from .fault import Fault
from .hazards import Hazards
from .kernel import Kernel
from .lds import Lds
from .memory import Memory
from .wave import LANES, Wave

#: LDS of a compute unit.
LDS_BYTES = {"gfx942": 64 << 10, "gfx950": 160 << 10}


@attrs.frozen
class Rules:
    """Rules that are checked; all by default."""

    wait_states: bool = True
    unobserved: bool = True
    pending: bool = True
    races: bool = True
    late_reads: bool = True
    undefined: bool = True
    coherence: bool = True
    descriptors: bool = True
    order: str | int = "up"
    slice: int = 200_000
    limit: int = 50_000_000


@attrs.define(eq=False)
class Group:
    """A workgroup: waves, LDS, number of barriers."""

    number: int
    index: tuple[int, int, int]
    memory: Memory
    lds: Lds
    rules: Rules
    first_wave: int
    epoch: int = 0
    waves: list[Wave] = attrs.field(factory=list)

    @property
    def ended(self) -> bool:
        return all(wave.ended for wave in self.waves)


@attrs.frozen
class Run:
    """Statistics of a launch: instructions in all, by kind, and in the first wave."""

    issued: int
    kinds: dict[str, int]
    first_wave: int


def launch(
    kernel: Kernel,
    grid: Sequence[int],
    block: Sequence[int],
    arguments: bytes,
    memory: Memory,
    rules: Rules | None = None,
    lds_bytes: int = 0,
) -> Run:
    """Run a grid [x, y, z] of workgroups of ``block`` threads, with ``lds_bytes`` of additional
    LDS.
    """
    rules = rules or Rules()
    shape, threads = _three(grid), _three(block)
    total = threads[0] * threads[1] * threads[2]
    if kernel.lds_bytes + lds_bytes > LDS_BYTES[kernel.gfx]:
        raise Fault("bounds", f"{kernel.name}: {kernel.lds_bytes + lds_bytes} bytes of LDS, {kernel.gfx} has {LDS_BYTES[kernel.gfx]}")
    memory.begin()
    address = memory.place(f"the arguments of {kernel.name}", np.frombuffer(arguments.ljust(4, b"\0"), np.uint8))
    machine = Machine(kernel, rules)
    groups = []
    indices = [(x, y, z) for z in range(shape[2]) for y in range(shape[1]) for x in range(shape[0])]
    for number, index in enumerate(indices):
        lds = Lds(kernel.lds_bytes + lds_bytes, races=rules.races, late_reads=rules.late_reads, undefined=rules.undefined)
        group = Group(number, index, memory, lds, rules, len(memory.groups))
        memory.groups += [number] * -(-total // LANES)
        groups.append(group)
    for group in _ordered(groups, rules.order):
        for wave_number in range(-(-total // LANES)):
            wave = Wave(group, wave_number, rules.slice)
            kernel.start(wave, group.index, LANES * wave_number, threads, address, arguments)
            group.waves.append(wave)
    waiting = _ordered(groups, rules.order)
    while waiting:
        for group in waiting:
            machine.advance(group)
        waiting = [group for group in waiting if not group.ended]
    memory.end()
    return Run(machine.issued, machine.kinds, machine.first)


def _three(sizes: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*sizes, 1, 1, 1)[:3]
    return x, y, z


def _ordered(groups: list[Group], order: str | int) -> list[Group]:
    if order == "up":
        return groups
    if order == "down":
        return groups[::-1]
    shuffled = list(groups)
    random.Random(order).shuffle(shuffled)
    return shuffled


class Machine:
    """Issue the instructions of a kernel's waves."""

    def __init__(self, kernel: Kernel, rules: Rules) -> None:
        self.kernel = kernel
        self.rules = rules
        self.hazards = Hazards(kernel.gfx, unobserved=rules.unobserved)
        self.issued = 0
        self.first = 0
        self.kinds: dict[str, int] = {}

    def advance(self, group: Group) -> None:
        """Run a workgroup until its end or time limit."""
        left = self.rules.slice
        while left > 0 and not group.ended:
            before = self.issued
            for wave in group.waves:
                if not wave.ended and not wave.waiting:
                    self._run(wave, left)
            alive = [wave for wave in group.waves if not wave.ended]
            if alive and all(wave.waiting for wave in alive):
                if len(alive) < len(group.waves) and self.rules.races:
                    raise Fault(
                        "hang",
                        f"{self._where(alive[0])}: a barrier that {len(group.waves) - len(alive)} waves of the workgroup never reach",
                    )
                group.epoch += 1
                group.memory.barrier([group.first_wave + wave.number for wave in alive])
                for wave in alive:
                    wave.waiting = False
            left -= self.issued - before
        if self.issued > self.rules.limit:
            raise Fault("hang", f"{self.kernel.name}: {self.issued} instructions, and workgroup {group.index} has not ended")

    def _where(self, wave: Wave) -> str:
        bound = self.kernel.bound[min(wave.pc, len(self.kernel.bound) - 1)]
        return f"{self.kernel.name}, workgroup {wave.group.index}, wave {wave.number}, {bound.instruction}"

    def _run(self, wave: Wave, budget: int) -> None:
        """Issue a wave's instructions until a barrier, its end or its time limit."""
        bound, hazards, rules = self.kernel.bound, self.hazards, self.rules
        count = 0
        try:
            with np.errstate(all="ignore"):
                while count < budget:
                    now = bound[wave.pc]
                    if wave.pending and rules.pending and not now.touched.isdisjoint(wave.pending):
                        waits.check(wave, now)
                    if rules.wait_states:
                        hazards.check(wave, now)
                        now.run(wave)
                        hazards.note(wave, now)
                    else:
                        now.run(wave)
                    count += 1
                    self.kinds[now.kind] = self.kinds.get(now.kind, 0) + 1
                    wave.time += 1
                    if wave.ended:
                        waits.end(wave)
                        break
                    wave.pc += 1
                    if wave.waiting:
                        break
        except IndexError as error:
            raise Fault("hang", f"{self._where(wave)}: runs on behind the last instruction") from error
        except Fault as fault:
            raise Fault(fault.rule, f"{self._where(wave)}: {fault.message}") from fault
        self.issued += count
        if wave.group.number == 0 and wave.number == 0:
            self.first += count
