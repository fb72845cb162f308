"""PTX as it is written: instructions one after the other, and the registers that they use."""

from __future__ import annotations

from collections import Counter
from types import MappingProxyType

import attrs

#: Kind of a register -> how it is declared, and what its names start with.
KINDS = MappingProxyType({"pred": "p", "b16": "h", "b32": "r", "f32": "f", "b64": "d"})


@attrs.define
class Text:
    """The body of one kernel as it grows.

    Attributes:
        lines: what was written.
        taken: registers given out, by kind.
        labels: labels given out, by stem.
    """

    lines: list[str] = attrs.field(factory=list)
    taken: Counter[str] = attrs.field(factory=Counter)
    labels: Counter[str] = attrs.field(factory=Counter)

    def new(self, kind: str) -> str:
        """A register that nobody has."""
        self.taken[kind] += 1
        return f"%{KINDS[kind]}{self.taken[kind] - 1}"

    def many(self, kind: str, count: int) -> list[str]:
        """So many of them."""
        return [self.new(kind) for _ in range(count)]

    def op(self, name: str, *operands: object, when: str = "") -> None:
        """An instruction, under a predicate where one is given."""
        guard = f"@{when} " if when else ""
        self.lines.append(f"    {guard}{name} {', '.join(map(str, operands))};" if operands else f"    {guard}{name};")

    def to(self, kind: str, name: str, *operands: object) -> str:
        """An instruction whose result goes to a new register, which is returned."""
        result = self.new(kind)
        self.op(name, result, *operands)
        return result

    def label(self, stem: str) -> str:
        """A new label, not yet placed."""
        self.labels[stem] += 1
        return f"{stem}_{self.labels[stem]}"

    def place(self, label: str) -> None:
        """The label stands here."""
        self.lines.append(f"{label}:")

    def declarations(self) -> list[str]:
        """What declares the registers."""
        return [f"    .reg .{kind} %{stem}<{self.taken[kind]}>;" for kind, stem in KINDS.items() if self.taken[kind]]
