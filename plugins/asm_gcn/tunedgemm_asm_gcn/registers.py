"""Represent registers as values and allocate them."""

from __future__ import annotations

import attrs
from tunedgemm.plugin import PluginError

#: Named registers: file -> number of 32-bit units.
NAMED = {"scc": 1, "vcc": 2, "exec": 2, "m0": 1}
#: Registers of a lane (`v` and `a` share a file of 512 from gfx90a on); scalars of a wave without
#: VCC.
MOST = {"v": 256, "a": 256, "s": 102}


@attrs.frozen
class Reg:
    """Adjacent registers of one file.

    Attributes:
        file: ``v``, ``a``, ``s``, a name of `NAMED`, or ``lds`` for a part of LDS, which no operand
            names.
        index: first register.
        count: number of registers.
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
        """Return the registers in groups of four."""
        return tuple(self[first : first + 4] for first in range(0, self.count, 4))

    @property
    def units(self) -> tuple[tuple[str, int], ...]:
        """Return each single register."""
        return tuple((self.file, self.index + offset) for offset in range(self.count))

    def __str__(self) -> str:
        if self.file in NAMED:
            return self.file
        return f"{self.file}{self.index}" if self.count == 1 else f"{self.file}[{self.index}:{self.index + self.count - 1}]"


SCC, VCC, EXEC, M0 = (Reg(name, 0, count) for name, count in NAMED.items())


@attrs.define
class Registers:
    """Allocator of the registers of each file, in ascending order.

    Attributes:
        taken: registers allocated in each file, alignment gaps included.
    """

    taken: dict[str, int] = attrs.field(factory=lambda: {"v": 0, "a": 0, "s": 0})

    def __call__(self, file: str, count: int = 1, align: int = 0) -> Reg:
        """Allocate registers; groups are aligned to 2, groups of four or more scalars to 4.

        Raises:
            PluginError: the file has too few registers.
        """
        align = align or (4 if file == "s" and count >= 4 else 2 if count > 1 else 1)
        first = -(-self.taken[file] // align) * align
        if first + count > MOST[file]:
            raise PluginError(f"file {file}: {first + count} registers exceed {MOST[file]}")
        self.taken[file] = first + count
        return Reg(file, first, count)
