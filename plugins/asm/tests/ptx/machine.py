"""Model CTAs, their warpgroups, and the order of events."""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

from .causality import Causality
from .memory import Fault, Memory, Shared

LANES = 128
_LINE = re.compile(r"(?:@(!?)(%p\d+) )?([a-z_][\w.:]*)\s*(.*);")


@attrs.frozen
class Instruction:
    """One line: predicate, name and operands."""

    negated: bool
    guard: str
    name: str
    operands: tuple[str, ...]


@attrs.frozen
class Program:
    """A parsed kernel."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    parameter: str
    threads: int
    cluster: int
    registers: int


def split_operands(text: str) -> tuple[str, ...]:
    """Split at commas outside brackets."""
    parts, depth, part = [], 0, ""
    for char in text:
        depth += (char in "[{") - (char in "]}")
        if char == "," and not depth:
            parts.append(part.strip())
            part = ""
        else:
            part += char
    return tuple([*parts, part.strip()] if part.strip() else parts)


def read(text: str) -> Program:
    """Parse a text."""
    head, body = text.split("\n{\n")
    (parameter,) = re.findall(r"\.param \.align 64 \.b8 (\w+)\[\d+\]", head)
    instructions, labels = [], {}
    for line in body.splitlines():
        stripped = line.strip()
        if stripped.endswith(":"):
            labels[stripped[:-1]] = len(instructions)
        elif stripped and not stripped.startswith((".reg", "//", "}")):
            match = _LINE.fullmatch(stripped)
            assert match, stripped
            instructions.append(Instruction(match[1] == "!", match[2] or "", match[3], split_operands(match[4])))
    number = {name: int(value) for name, value in re.findall(r"\.(reqntid|reqnctapercluster|maxnreg) (\d+)", head)}
    cluster = number.get("reqnctapercluster", 1)
    return Program(tuple(instructions), labels, parameter, number["reqntid"], cluster, number["maxnreg"])


@attrs.define(eq=False)
class Block:
    """One CTA."""

    index: int
    rank: int
    shared: Shared
    pool: int
    cluster: Cluster
    waiting: dict[int, int] = attrs.field(factory=dict)
    generation: dict[int, int] = attrs.field(factory=dict)


@attrs.define(eq=False)
class Cluster:
    """CTAs that access each other's shared memory."""

    blocks: list[Block] = attrs.field(factory=list)
    arrived: int = 0
    generation: int = 0


@attrs.define(eq=False)
class Unit:
    """One warpgroup."""

    block: Block
    group: int
    registers: int
    values: dict[str, np.ndarray] = attrs.field(factory=dict)
    at: np.ndarray = attrs.field(factory=lambda: np.zeros(LANES, np.int64))
    arrived: np.ndarray = attrs.field(factory=lambda: np.full(LANES, -1))
    unfenced: set[str] = attrs.field(factory=set)
    opened: list[Callable[[], None]] = attrs.field(factory=list)
    touched: set[str] = attrs.field(factory=set)
    regions: list[tuple[int, int]] = attrs.field(factory=list)
    flying: deque[tuple[list[Callable[[], None]], set[str], list[tuple[int, int]]]] = attrs.field(factory=deque)
    passing: int = -1
    stores: dict[int, Any] = attrs.field(factory=dict)
    copying: dict[int, list[tuple[int, np.ndarray]]] = attrs.field(factory=dict)

    @property
    def busy(self) -> set[str]:
        """Return the accumulators of incomplete instructions."""
        return self.touched.union(*(sums for _, sums, _ in self.flying))

    def finish(self) -> None:
        """Complete the oldest group of wgmma."""
        done, _, regions = self.flying.popleft()
        for each in done:
            each()
        for region in regions:
            self.block.shared.reading.remove(region)


@attrs.define(eq=False)
class Arrival:
    """A delayed arrival at a barrier of the cluster; a fault at a CTA that has exited."""

    unit: Unit
    land: Callable[[], None]

    def __call__(self) -> None:
        self.land()


@attrs.define(eq=False)
class Machine:
    """A running grid of CTAs."""

    program: Program
    memory: Memory
    arguments: bytes
    chance: random.Random
    units: list[Unit] = attrs.field(factory=list)
    copies: list[Callable[[], None]] = attrs.field(factory=list)
    stores: list[Callable[[], None]] = attrs.field(factory=list)
    arrivals: list[Arrival] = attrs.field(factory=list)
    grid: int = 0
    resident: int = 0
    queue: list[list[Unit]] = attrs.field(factory=list)
    causality: Causality = attrs.field(factory=Causality)

    def start(self, grid: int, shared_bytes: int, resident: int = 0) -> None:
        """Start all CTAs, or *resident* clusters and the others after them in random order."""
        program, self.grid, self.resident = self.program, grid, resident
        for first in range(0, grid, program.cluster):
            cluster, units = Cluster(), []
            for index in range(first, first + program.cluster):
                block = Block(index, index - first, Shared(shared_bytes), 0, cluster)
                cluster.blocks.append(block)
                units += [Unit(block, group, program.registers) for group in range(program.threads // LANES)]
            self.queue.append(units)
        if resident:
            self.chance.shuffle(self.queue)
        else:
            self.units, self.queue = [unit for units in self.queue for unit in units], []

    def _unfinished(self) -> list[Unit]:
        """Return the warpgroups that can run, within the resident clusters."""
        end = len(self.program.instructions)
        while True:
            found = [unit for unit in self.units if (unit.at < end).any()]
            if not self.queue or len({id(unit.block.cluster) for unit in found}) >= self.resident:
                return found
            self.units += self.queue.pop(0)

    def run(self, step: Callable[[Machine, Unit], bool]) -> None:
        """Run to the end in random order.

        Raises:
            Fault: nothing can go on.
        """
        idle, end = 0, len(self.program.instructions)
        while unfinished := self._unfinished():
            for pending in (self.copies, self.stores, self.arrivals):
                if pending and self.chance.random() < 0.3:
                    pending.pop(self.chance.randrange(len(pending)))()
                    idle = 0
            unit = self.chance.choice(unfinished)
            if unit.flying and self.chance.random() < 0.3:
                unit.finish()
                idle = 0
            moved = False
            for _ in range(self.chance.randrange(1, 200)):
                if not ((unit.at < end).any() and step(self, unit)):
                    break
                moved = True
            idle = 0 if moved else idle + 1
            under_way = self.copies or self.stores or self.arrivals or any(each.flying for each in unfinished)
            if idle > 200 * len(self.units) and not under_way:
                where = sorted({(each.block.index, each.group, int(each.at.min())) for each in unfinished})
                raise Fault(f"nothing goes on: {[(*place, self.program.instructions[place[2]].name) for place in where[:6]]}")
        if self.copies or self.arrivals or any(unit.flying for unit in self.units):
            raise Fault("the kernel ended before its copies, products or arrivals")
        if any(not entry.waited for unit in self.units for entry in unit.block.shared.leaving):
            raise Fault("a block ended before the copy engine had read its shared memory")
        while self.stores:
            self.stores.pop(self.chance.randrange(len(self.stores)))()
