"""Findings: all that some tables, trial logs, profiles and lists of shapes say about shapes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import attrs

from tunedgemm.analysis.coverage.captured import Replays
from tunedgemm.analysis.results.entry import UNKNOWN, Entry
from tunedgemm.analysis.results.files import Faults
from tunedgemm.device import Device
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.table.csvfile import key_shape
from tunedgemm.table.untuned import Untuned, layers_of_both


@attrs.frozen
class Run:
    """The header of a tuning run, as its log has it."""

    id: str
    op: str
    version: str
    started: str
    identity: tuple[tuple[str, str], ...] = ()


@attrs.define
class Findings:
    """What the files of one side say.

    Attributes:
        files: each file with its kind.
        entries: the shapes, by device and shape.
        runs: the headers of runs.
        versions: versions of libraries in rows of tables.
        faults: the unreadable lines of each file.
        notes: remarks for the reader.
        timings: how many trials were read.
    """

    files: list[tuple[Path, str]] = attrs.field(factory=list)
    entries: dict[tuple[Device, Shape], Entry] = attrs.field(factory=dict)
    runs: list[Run] = attrs.field(factory=list)
    versions: set[str] = attrs.field(factory=set)
    faults: list[Faults] = attrs.field(factory=list)
    notes: list[str] = attrs.field(factory=list)
    timings: int = 0

    def entry(self, device: Device, op: Op, shape: Shape) -> Entry:
        """Return the entry of a shape on a device, made at its first use."""
        key = (device, key_shape(shape))
        found = self.entries.get(key)
        if found is None:
            found = self.entries[key] = Entry(*key[:1], op, key[1])
        return found

    @property
    def devices(self) -> list[Device]:
        """Return the devices, those with the most shapes first."""
        counts: dict[Device, int] = {}
        for device, _ in self.entries:
            counts[device] = counts.get(device, 0) + 1
        return sorted(counts, key=lambda device: (-counts[device], str(device)))

    def name_devices(self, given: Device | None) -> None:
        """Give entries of files that name no device the one that they mean, where it is certain.

        Args:
            given: the device that the user names for them.
        """
        named = [device for device in self.devices if device.name]
        for device in [device for device in self.devices if not device.name]:
            fitting = [given] if given is not None else named
            known = [other for other in fitting if device.gfx == UNKNOWN or (other.gfx, other.cu_num) == (device.gfx, device.cu_num)]
            if len(known) == 1:
                self._rename(device, known[0])
                source = "--device says so" if given else "the other files name no other device of its kind"
                self.notes.append(f"lines that name no device count as {known[0]}: {source}")

    def _rename(self, device: Device, known: Device) -> None:
        for key in [key for key in self.entries if key[0] == device]:
            entry = self.entries.pop(key)
            entry.device = known
            kept = self.entries.setdefault((known, key[1]), entry)
            if kept is not entry:
                kept.join(entry)

    def count_calls(self, listed: Iterable[Untuned], replays: Replays) -> int:
        """Add the calls of captured shapes to their entries; return how many calls have none."""
        by_shape: dict[Shape, list[Entry]] = {}
        for (_, shape), entry in self.entries.items():
            by_shape.setdefault(shape, []).append(entry)
        missing = 0
        for call in listed:
            calls = call.count + call.graph * replays.at(call.shape.m)
            keys = (key_shape(call.shape), *self._equivalent(call.shape, by_shape))
            entries = next((by_shape[key] for key in keys if key in by_shape), [])
            missing += 0 if entries else calls
            for entry in entries:
                entry.calls += calls
                entry.layer = layers_of_both(entry.layer, call.layer)
        return missing

    @staticmethod
    def _equivalent(shape: Shape, known: dict[Shape, list[Entry]]) -> list[Shape]:
        op = next((entries[0].op for entries in known.values() if entries[0].op.name == shape.op), None)
        return [] if op is None else [key_shape(other) for other in op.equivalent_shapes(shape)]
