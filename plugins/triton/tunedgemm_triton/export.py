"""Between tuned tables and JSON files: rows become buckets, and buckets rows."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from tunedgemm.plugin import Device, Op, PluginError, Shape, Solution, UserError
from tunedgemm.tools import Row, read_log, read_rows

from tunedgemm_triton import buckets, jsonfile
from tunedgemm_triton.dialect import Dialect, sizes_of
from tunedgemm_triton.jsonfile import Name
from tunedgemm_triton.parameters import Entry

#: Microseconds by shape and solution.
Times = Mapping[Shape, Mapping[Solution, float]]
#: The same by device; times of one architecture are not compared with those of another.
Timed = dict[Device, dict[Shape, dict[Solution, float]]]


@attrs.frozen
class Exported:
    """What became of rows.

    Attributes:
        files: entries by key, by the file's name.
        left: rows that no file can hold, each with the reason.
    """

    files: dict[Name, dict[str, Entry]]
    left: tuple[str, ...] = ()


def files_of(rows: Iterable[Row], dialect: Dialect, style: str, times: Timed) -> Exported:
    """The files of one weight each that rows of a table make; rows without a time count as not there.

    Args:
        style: of the keys: ``new`` or ``legacy``.
        times: further times, which decide between rows of one bucket.
    """
    groups: dict[Name, list[Row]] = {}
    left: list[str] = []
    for row in rows:
        reason = _left(row, dialect)
        if reason:
            left.append(f"{row.shape}: {reason}")
        else:
            name = Name(row.gfx, dialect.tag_of(row.shape), sizes_of(row.shape))
            groups.setdefault(name, []).append(row)
    ordered = sorted(groups.items(), key=_place)
    return Exported({name: entries_of(group, dialect, style, times_on(name.gfx, times)) for name, group in ordered}, tuple(left))


def _place(item: tuple[Name, Any]) -> tuple[str, str, list[int]]:
    name = item[0]
    return name.gfx, name.tag, [size for _, size in name.sizes]


def _left(row: Row, dialect: Dialect) -> str:
    """Why no file can hold a row, or an empty text."""
    if row.solution.libtype != dialect.libtype:
        return f"is served by {row.solution.libtype}, not by {dialect.libtype}"
    if not row.valid:
        return "has no time"
    if not row.gfx:
        return "names no architecture"
    if not row.shape.m:
        return "pins one solution for every M"
    try:
        dialect.entry_of(row.solution, row.shape, row.gfx)
    except Exception as error:  # the dialect may be anybody's
        return str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"
    return ""


def entries_of(rows: Sequence[Row], dialect: Dialect, style: str, times: Times) -> dict[str, Entry]:
    """The entries of one file: for each bucket the row that costs its rows least, and ``any`` from the largest M."""
    bounds = buckets.bounds_of(dialect.tag_of(rows[0].shape))
    ordered = sorted(rows, key=lambda row: (row.shape.m, row.us))
    held: dict[str, list[Row]] = {}
    for row in ordered:
        held.setdefault(buckets.key_of(row.shape.m, style, bounds), []).append(row)
    entries = {key: _entry(cheapest(group, times), dialect) for key, group in held.items()}
    largest = next(row for row in ordered if row.shape.m == ordered[-1].shape.m)
    if style == buckets.LEGACY and largest.shape.m > buckets.rows_of("large"):
        entries["xlarge"] = _entry(largest, dialect)
    return {**entries, buckets.ANY: _entry(largest, dialect)}


def _entry(row: Row, dialect: Dialect) -> Entry:
    return dialect.entry_of(row.solution, row.shape, row.gfx)


def cheapest(rows: Sequence[Row], times: Times) -> Row:
    """Of the rows of one bucket that whose solution is the least slower over all of them, as far as its times are known.

    Where no solution was timed at every M, that of the largest.
    """
    best = {row.shape: row.us for row in reversed(rows)}

    def cost(candidate: Row) -> float:
        own = {**{row.shape: row.us for row in rows if row.solution == candidate.solution}}
        known = [own.get(shape) or times.get(shape, {}).get(candidate.solution, 0.0) for shape in best]
        return math.prod(us / best[shape] for us, shape in zip(known, best, strict=True)) if all(known) else math.inf

    costs = [cost(row) for row in rows]
    return rows[-1] if min(costs) == math.inf else rows[costs.index(min(costs))]


def default_of(files: Sequence[Mapping[str, Entry]]) -> dict[str, Entry]:
    """The file for all other weights: for each bucket the entry that most files have; of several the one that comes first."""
    keys = sorted({key for file in files for key in file}, key=lambda key: (key == buckets.ANY, buckets.rows_of(key), key))
    found: dict[str, Entry] = {}
    for key in keys:
        texts = Counter(json.dumps(file[key]) for file in files if key in file)
        found[key] = json.loads(texts.most_common(1)[0][0])
    return found


def neighbours_of(folder: Path, name: Name, style: str) -> list[Mapping[str, Entry]]:
    """The files in a folder of the same kernel and architecture, each of one weight, with the same way of keys; those that can be read."""
    found: list[Mapping[str, Entry]] = []
    for path in sorted(folder.glob(f"{name.gfx}-{name.tag}-*.json")):
        other = jsonfile.name_of(path)
        if other is not None and other.tag == name.tag and other.gfx == name.gfx and {letter for letter, _ in other.sizes} >= {"N", "K"}:
            with contextlib.suppress(UserError):  # a broken one is `check`'s to tell
                entries = jsonfile.read(path)
                found += [entries] if buckets.style_of(entries) == style else []
    return found


def timed(path: Path, op: Op) -> Timed:
    """The times of a trial log, or of a tuned table, for shapes of an op.

    Raises:
        UserError: the file cannot be read.
    """
    found: Timed = {}

    def note(device: Device, shape: Shape, solution: Solution, us: float) -> None:
        found.setdefault(device, {}).setdefault(shape, {})[solution] = us

    if path.suffix == ".csv":
        for row in read_rows(path, op)[0]:
            if row.valid and row.gfx and row.shape.m:
                note(Device(row.gfx, row.cu_num, row.device), row.shape, row.solution, row.us)
        return found
    for line in read_log(path):
        if line.kind == "trial":
            timing, (device, shape) = line.timing(), line.where()
            if timing.us > 0 and timing.status in ("ok", "screened") and shape.op == op.name:
                note(device, shape, timing.solution, timing.us)
    return found


def timed_beside(table: Path, op: Op) -> Timed:
    """The times of the trial log that the tuner keeps beside a table; none where there is none."""
    log = table.with_name(table.name.removesuffix(".csv") + ".trials.jsonl")
    return timed(log, op) if log.exists() else {}


def times_on(gfx: str, times: Timed) -> Times:
    """The times on all devices of an architecture."""
    found: dict[Shape, dict[Solution, float]] = {}
    for device, by_shape in times.items():
        for shape, us in by_shape.items() if device.gfx == gfx else ():
            found.setdefault(shape, {}).update(us)
    return found


def rows_of(entries: Mapping[str, Entry], dialect: Dialect, device: Device, times: Times) -> tuple[list[Row], list[str]]:
    """The rows that a file's entries make for shapes of its weight that were timed on a device; for which they make none, and why.

    A row needs a time, and a file has none: *times* has that of the solution that the file chooses, or there is no row.
    """
    rows, left = [], []
    for shape in sorted(times, key=lambda shape: shape.m):
        key = buckets.find(entries, shape.m, buckets.bounds_of(dialect.tag_of(shape)))
        if key is None:
            left.append(f"{shape}: no bucket answers for M={shape.m}")
            continue
        solution, notes = dialect.solution_of(entries[key], shape, device)
        us = times[shape].get(solution, 0.0) if solution else 0.0
        if solution is None:
            left.append(f"{shape}: {key}: {notes[-1] if notes else 'no kernel'}")
        elif us:
            rows.append(Row(shape, device.gfx, device.cu_num, device.name, solution, us))
        else:
            left.append(f"{shape}: {key}: {solution} was not timed")
    return rows, left
