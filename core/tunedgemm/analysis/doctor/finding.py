"""Values of a diagnosis: the facts of each section, and faults with their remedies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from tunedgemm.text.printable import printable_line

#: What a fact holds: a text, a number, or yes and no.
Value = str | int | float | bool

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


@attrs.frozen
class Fact:
    """One fact of a section: its name, its value, and further values by name."""

    name: str
    value: Value
    more: Mapping[str, Value] = attrs.field(factory=dict)

    def __str__(self) -> str:
        shown = ((key, _shown(key, value)) for key, value in self.more.items() if value != "")
        more = ", ".join(text if key == "bytes" else f"{key} {text}" for key, text in shown)
        return printable_line(f"{self.name}: {_shown('', self.value)}" + (f" ({more})" if more else ""))


@attrs.frozen
class Fault:
    """A fault with its remedy.

    Attributes:
        thing: what is faulty.
        fault: the fault, with the found value: ``writable by others (got mode 0777)``.
        remedy: what to do.
        harmless: whether it is only a note, which does not change the verdict.
    """

    thing: str
    fault: str
    remedy: str
    harmless: bool = False

    def __str__(self) -> str:
        return printable_line(f"{self.thing}: {self.fault}" + (f"; {self.remedy}" if self.remedy else ""))


@attrs.frozen
class Section:
    """The facts and faults of one part of the installation."""

    name: str
    facts: tuple[Fact, ...] = ()
    faults: tuple[Fault, ...] = ()


@attrs.frozen
class Diagnosis:
    """All sections, in the order in which they are printed."""

    sections: tuple[Section, ...]

    @property
    def healthy(self) -> bool:
        """Check that there are no faults other than harmless ones."""
        return not self.problems

    @property
    def problems(self) -> list[tuple[str, Fault]]:
        """Return the faults that are not harmless, with the names of their sections."""
        return self._faults(harmless=False)

    @property
    def notes(self) -> list[tuple[str, Fault]]:
        """Return the harmless faults, with the names of their sections."""
        return self._faults(harmless=True)

    def _faults(self, *, harmless: bool) -> list[tuple[str, Fault]]:
        """Return faults once each, with the first section that found them."""
        found: dict[Fault, str] = {}
        for section in self.sections:
            for fault in section.faults:
                if fault.harmless == harmless:
                    found.setdefault(fault, section.name)
        return [(name, fault) for fault, name in found.items()]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: the same facts and faults as the text."""
        return {
            "healthy": self.healthy,
            "problems": [_fault_dict(*problem) for problem in self.problems],
            "notes": [_fault_dict(*note) for note in self.notes],
            "sections": {
                section.name: [{"name": fact.name, "value": fact.value, **fact.more} for fact in section.facts] for section in self.sections
            },
        }


def fault_of_error(error: Exception) -> Fault:
    """Return the fault that a user's error describes: ``thing: fault (got X); remedy``."""
    thing, _, text = str(error).partition(": ")
    fault, _, remedy = text.rpartition("; ")
    return Fault(thing, fault, remedy) if fault else Fault(thing, text, "")


def _fault_dict(section: str, fault: Fault) -> dict[str, str]:
    return {"section": section, "thing": fault.thing, "fault": fault.fault, "remedy": fault.remedy, "text": str(fault)}


def _shown(key: str, value: Value) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key == "bytes":
        size, unit = float(value), 0
        while size >= 1024 and unit < len(_UNITS) - 1:
            size, unit = size / 1024, unit + 1
        return f"{size:.0f} bytes" if not unit else f"{size:.1f} {_UNITS[unit]}"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
