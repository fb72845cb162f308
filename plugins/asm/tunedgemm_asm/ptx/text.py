"""Write PTX: instructions in order, and the registers that they use."""

from __future__ import annotations

from collections import Counter
from types import MappingProxyType

import attrs

#: Kind of a register -> prefix of its names.
KINDS = MappingProxyType({"pred": "p", "b16": "h", "b32": "r", "f32": "f", "b64": "d"})


@attrs.define
class Text:
    """Growing body of one kernel.

    Attributes:
        lines: lines written.
        taken: number of registers allocated, by kind.
        labels: number of labels allocated, by stem.
    """

    lines: list[str] = attrs.field(factory=list)
    taken: Counter[str] = attrs.field(factory=Counter)
    labels: Counter[str] = attrs.field(factory=Counter)

    def new(self, kind: str) -> str:
        """Allocate a register."""
        self.taken[kind] += 1
        return f"%{KINDS[kind]}{self.taken[kind] - 1}"

    def many(self, kind: str, count: int) -> list[str]:
        """Allocate this many registers."""
        return [self.new(kind) for _ in range(count)]

    def op(self, name: str, *operands: object, when: str = "") -> None:
        """Write an instruction, with a guard predicate where given."""
        guard = f"@{when} " if when else ""
        self.lines.append(f"    {guard}{name} {', '.join(map(str, operands))};" if operands else f"    {guard}{name};")

    def to(self, kind: str, name: str, *operands: object) -> str:
        """Write an instruction whose result goes to a new register, and return the register."""
        result = self.new(kind)
        self.op(name, result, *operands)
        return result

    def label(self, stem: str) -> str:
        """Allocate a label; `place` writes it."""
        self.labels[stem] += 1
        return f"{stem}_{self.labels[stem]}"

    def place(self, label: str) -> None:
        """Write a label."""
        self.lines.append(f"{label}:")

    def declarations(self) -> list[str]:
        """Return the declarations of all registers."""
        return [f"    .reg .{kind} %{stem}<{self.taken[kind]}>;" for kind, stem in KINDS.items() if self.taken[kind]]
