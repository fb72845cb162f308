"""Registers as values, and who has which."""

from __future__ import annotations

import attrs
from tunedgemm.plugin import PluginError

#: Registers with names of their own, by file: how they are written, and how many units of 32 bits they have.
NAMED = {"scc": 1, "vcc": 2, "exec": 2, "m0": 1}
#: Registers of a lane: `v` and `a` share one file of 512 on gfx90a and later; scalar registers of a wave beside VCC.
MOST = {"v": 256, "a": 256, "s": 102}


@attrs.frozen
class Reg:
    """Some neighbouring registers of one file.

    Attributes:
        file: ``v``, ``a``, ``s``, a name of `NAMED`, or ``lds`` for a part of the workgroup's LDS, which no instruction names.
        index: of the first.
        count: how many.
    """

    file: str
    index: int = 0
    count: int = 1

    def __getitem__(self, at: int | slice) -> Reg:
        if isinstance(at, int):
            at = slice(at, at + 1)
        first, last, _ = at.indices(self.count)
        return Reg(self.file, self.index + first, last - first)

    def fours(self) -> tuple[Reg, ...]:
        """These registers in groups of four."""
        return tuple(self[first : first + 4] for first in range(0, self.count, 4))

    @property
    def units(self) -> tuple[tuple[str, int], ...]:
        """Each single register."""
        return tuple((self.file, self.index + one) for one in range(self.count))

    def __str__(self) -> str:
        if self.file in NAMED:
            return self.file
        return f"{self.file}{self.index}" if self.count == 1 else f"{self.file}[{self.index}:{self.index + self.count - 1}]"


SCC, VCC, EXEC, M0 = (Reg(name, 0, count) for name, count in NAMED.items())


@attrs.define
class Registers:
    """Gives out registers of each file, from the first on.

    Attributes:
        taken: of each file, how many were given out, gaps before aligned ones included.
    """

    taken: dict[str, int] = attrs.field(factory=lambda: {"v": 0, "a": 0, "s": 0})

    def __call__(self, file: str, count: int = 1, align: int = 0) -> Reg:
        """Some that nobody has; groups start at an even register, groups of scalars of four and more at a multiple of four.

        Raises:
            PluginError: there are not as many.
        """
        align = align or (4 if file == "s" and count >= 4 else 2 if count > 1 else 1)
        first = -(-self.taken[file] // align) * align
        if first + count > MOST[file]:
            raise PluginError(f"{first + count} registers of file {file}, of which there are {MOST[file]}")
        self.taken[file] = first + count
        return Reg(file, first, count)
