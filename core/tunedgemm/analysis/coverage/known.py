"""Known times of solutions on a device: trials of tables, and rows of tables to compare with."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import attrs

from tunedgemm.analysis.compare.production import rows_for
from tunedgemm.device import Device
from tunedgemm.errors import TableError
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import key_shape, read_rows
from tunedgemm.table.sheet import present
from tunedgemm.tuner.log import Line, read_log, trials_path


@attrs.frozen
class Time:
    """A time of one call.

    Attributes:
        us: microseconds.
        source: ``trial`` or ``against``.
        path: the file it comes from.
    """

    us: float = attrs.field(validator=attrs.validators.gt(0))
    source: str = attrs.field(validator=attrs.validators.in_(("trial", "against")))
    path: Path


@attrs.define
class KnownTimes:
    """The lowest times known on a device, by shape and solution.

    Attributes:
        times: the times; shapes are keys of tables.
        notes: unreadable files.
    """

    times: dict[Shape, dict[Solution, Time]] = attrs.field(factory=dict)
    notes: list[str] = attrs.field(factory=list)

    def of(self, op: Op, shape: Shape, solution: Solution) -> Time | None:
        """Return the time of a solution at a shape."""
        return self._at(op, shape).get(solution)

    def best(self, op: Op, shape: Shape) -> tuple[Solution, Time] | None:
        """Return the fastest solution at a shape."""
        times = self._at(op, shape)
        return min(times.items(), key=lambda item: (item[1].us, str(item[0]))) if times else None

    def _at(self, op: Op, shape: Shape) -> Mapping[Solution, Time]:
        """Return the times at a shape, or at its first equivalent shape with a known time."""
        return next((times for other in op.equivalent_shapes(shape) if (times := self.times.get(key_shape(other)))), {})

    def note(self, shape: Shape, solution: Solution, time: Time) -> None:
        """Keep a time if it is the lowest of its solution."""
        at = self.times.setdefault(shape, {})
        if solution not in at or time.us < at[solution].us:
            at[solution] = time


def known_times(op: Op, device: Device, shapes: Iterable[Shape], tables: Iterable[Path], against: Iterable[Path]) -> KnownTimes:
    """Read the known times of shapes on a device.

    Args:
        shapes: the shapes.
        tables: tables whose trial logs are read; an unreadable log is noted.
        against: tables whose rows count, too, with their trial logs.

    Raises:
        TableError: a table of *against* cannot be read.
    """
    times, wanted = KnownTimes(), {key_shape(other) for shape in shapes for other in op.equivalent_shapes(shape)}
    against = tuple(against)
    for path in against:
        for row in rows_for(device, read_rows(path, op)[0]):
            if row.shape in wanted:
                times.note(row.shape, row.solution, Time(row.us, "against", path))
    sizes = {(shape.m, shape.n, shape.k) for shape in wanted}
    for log in dict.fromkeys(trials_path(table) for table in (*tables, *against)):
        if present(log):
            try:
                _read(times, log, op, device, wanted, sizes)
            except TableError as error:
                times.notes.append(f"trials left out: {error}")
    return times


def _read(times: KnownTimes, log: Path, op: Op, device: Device, wanted: Collection[Shape], sizes: Collection[tuple]) -> None:
    """Note a log's right trials of these shapes on the device; parse few lines, because logs are long."""
    for line in read_log(log):
        shape = line.fields.get("shape")
        if line.kind != "trial" or line.fields.get("status") != "ok" or not isinstance(shape, dict) or shape.get("op") != op.name:
            continue
        if (shape.get("m"), shape.get("n"), shape.get("k")) not in sizes or not _ran_on(device, line):
            continue
        timing = line.timing()
        if timing.ok and (key := key_shape(timing.shape)) in wanted:
            times.note(key, timing.solution, Time(timing.us, "trial", log))


def _ran_on(device: Device, line: Line) -> bool:
    fields = line.fields
    name = fields.get("device", "")
    return (fields.get("gfx"), fields.get("cu_num")) == (device.gfx, device.cu_num) and (name == device.name or not device.name)
