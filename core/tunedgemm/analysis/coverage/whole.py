"""Coverage as a whole: all entries, their sums, the unused rows, and the next shapes to tune."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs

from tunedgemm.analysis.coverage.proposal import Next, propose
from tunedgemm.analysis.coverage.result import WORDS, Entry, Group, Unused, layer_of
from tunedgemm.device import Device
from tunedgemm.errors import UserError
from tunedgemm.table.csvfile import Problem

#: Keys by which entries are summed up.
BY = ("op", "layer", "shape")


@attrs.frozen
class Coverage(Group):
    """The answers to a workload's calls on a device.

    Attributes:
        name: the names of the files.
        entries: an entry for each shape, the longest time first.
        device: the device.
        paths: the files with the captured calls.
        problems: their unreadable lines.
        notes: further remarks.
    """

    device: Device
    paths: tuple[Path, ...] = ()
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ops(self) -> tuple[str, ...]:
        """Return the called ops."""
        return tuple(dict.fromkeys(entry.shape.op for entry in self.entries))

    def by(self, what: str) -> tuple[Group, ...]:
        """Sum up the entries by ``op``, ``layer`` (all of a shape but M) or ``shape``, the longest time first.

        Raises:
            UserError: *what* is none of these.
        """
        if what not in BY:
            raise UserError(f"coverage.by: expected one of {', '.join(BY)} (got {what!r})")
        keys = {"op": lambda entry: entry.shape.op, "layer": lambda entry: layer_of(entry.shape), "shape": lambda entry: entry.shape}
        groups = (Group(_name(what, entries), tuple(entries)) for entries in _grouped(self.entries, keys[what]).values())
        return tuple(sorted(groups, key=lambda group: (-group.time, group.name)))

    def ways(self) -> Iterator[tuple[str, Group]]:
        """Yield each word of `WORDS` that occurs, with the entries that are served so."""
        by_word = _grouped(self.entries, lambda entry: entry.how)
        yield from ((word, Group(meaning, tuple(by_word[word]))) for word, meaning in WORDS.items() if word in by_word)

    def parts(self, of: Group | Unused) -> dict[str, float]:
        """Return the shares of all ``calls`` and of all ``time``, 0 to 1."""
        return {what: getattr(of, what) / total if (total := getattr(self, what)) else 0.0 for what in ("calls", "time")}

    def unused(self) -> tuple[Unused, ...]:
        """Return the reasons why rows are not used, with their calls, the longest time first."""
        by_reason: dict[tuple[str, str], list[Entry]] = {}
        for entry in self.entries:
            for libtype, reason in dict.fromkeys((passed.solution.libtype, passed.reason) for passed in entry.passed):
                by_reason.setdefault((libtype, reason), []).append(entry)
        unused = (Unused(*key, _sum(entries, "calls"), _sum(entries, "time")) for key, entries in by_reason.items())
        return tuple(sorted(unused, key=lambda rows: (-rows.time, rows.libtype, rows.reason)))

    def by_table_layer(self) -> dict[str, Group]:
        """Return the entries that rows serve, by the layer of their table, the longest time first."""
        members = _grouped((entry for entry in self.entries if entry.table_layer), lambda entry: entry.table_layer)
        groups = [Group(name, tuple(entries)) for name, entries in members.items()]
        return {group.name: group for group in sorted(groups, key=lambda group: -group.time)}

    def next(self, most: int = 10) -> list[Next]:
        """Return at most *most* layers to tune next, the longest time first; see `propose`."""
        return propose(self.entries, most)

    def rows(self, *words: str, by: str = "time") -> float:
        """Return the share of calls, or time, whose best row has one of these words, used or not."""
        total = getattr(self, by)
        part: float = sum(getattr(entry, by) for entry in self.entries if entry.row in words)
        return part / total if total else 0.0


def _grouped(entries: Iterable[Entry], key: Callable[[Entry], Any]) -> dict[Any, list[Entry]]:
    groups: dict[Any, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(key(entry), []).append(entry)
    return groups


def _sum(entries: Iterable[Entry], what: str) -> int:
    total: int = sum(getattr(entry, what) for entry in entries)
    return total


def _name(what: str, entries: list[Entry]) -> str:
    """Return a group's name: its distinguishing fields, and the file's names of its layers."""
    shape = entries[0].shape
    if what == "op":
        return shape.op
    text = str(shape) if what == "shape" else str(layer_of(shape)).replace("M=0 ", "", 1)
    layers = list(dict.fromkeys(entry.layer for entry in entries if entry.layer))
    return text + (f" ({', '.join(layers)})" if layers else "")
