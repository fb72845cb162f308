"""Implement ``tunedgemm triton export``: convert rows of tuned tables to JSON files and back."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import attrs
from tunedgemm.plugin import Device, Op, PluginError, Shape, Solution, UserError
from tunedgemm.tools.tables import Row, read_log, read_rows

from tunedgemm_triton.jsonfiles import buckets
from tunedgemm_triton.jsonfiles import files as json_files
from tunedgemm_triton.jsonfiles.dialect import Dialect, sizes_of
from tunedgemm_triton.jsonfiles.entries import Entry
from tunedgemm_triton.jsonfiles.files import Name

#: Microseconds by shape and solution.
Times = Mapping[Shape, Mapping[Solution, float]]
#: Times by device; those of different architectures are not compared.
Timed = dict[Device, dict[Shape, dict[Solution, float]]]


@attrs.frozen
class Exported:
    """Files that rows were converted to.

    Attributes:
        files: file name -> key -> entry.
        left: rows that no file can hold, each with the reason.
    """

    files: dict[Name, dict[str, Entry]]
    left: tuple[str, ...] = ()


def files_of(rows: Iterable[Row], dialect: Dialect, style: str, times: Timed) -> Exported:
    """Convert rows of a table to files, each of one weight; ignore rows without a time.

    Args:
        style: of the keys: ``new`` or ``legacy``.
        times: further times, to choose between rows of one bucket.
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
    ordered = sorted(groups.items(), key=lambda item: (item[0].gfx, item[0].tag, [size for _, size in item[0].sizes]))
    return Exported({name: entries_of(group, dialect, style, times_on(name.gfx, times)) for name, group in ordered}, tuple(left))


def _left(row: Row, dialect: Dialect) -> str:
    """Return why no file can hold a row, or an empty text."""
    if row.solution.libtype != dialect.libtype:
        return f"libtype must be {dialect.libtype} (got {row.solution.libtype})"
    if row.shape.op not in dialect.ops:
        return f"{dialect.libtype} has no JSON files for {row.shape.op}"
    if not row.valid:
        return "has no time"
    if not row.gfx:
        return "has no architecture"
    if not row.shape.m:
        return "pins one solution for every M"
    try:
        dialect.entry_of(row.solution, row.shape, row.gfx)
    except Exception as error:  # a dialect of another package may raise anything
        return str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"
    return ""


def entries_of(rows: Sequence[Row], dialect: Dialect, style: str, times: Times) -> dict[str, Entry]:
    """Return the entries of one file: for each bucket the cheapest row, and ``any`` from the
    largest M.
    """
    bounds = buckets.bounds_of(dialect.tag_of(rows[0].shape))
    ordered = sorted(rows, key=lambda row: (row.shape.m, row.us))
    groups: dict[str, list[Row]] = {}
    for row in ordered:
        groups.setdefault(buckets.key_of(row.shape.m, style, bounds), []).append(row)
    entries = {key: _entry(cheapest(group, times), dialect) for key, group in groups.items()}
    largest = next(row for row in ordered if row.shape.m == ordered[-1].shape.m)
    if style == buckets.LEGACY and largest.shape.m > buckets.rows_of("large"):
        entries["xlarge"] = _entry(largest, dialect)
    return {**entries, buckets.ANY: _entry(largest, dialect)}


def _entry(row: Row, dialect: Dialect) -> Entry:
    return dialect.entry_of(row.solution, row.shape, row.gfx)


def cheapest(rows: Sequence[Row], times: Times) -> Row:
    """Return the row of one bucket whose solution loses the least over all its rows.

    Where no solution was timed at every M, return the row of the largest M.
    """
    best = {row.shape: row.us for row in reversed(rows)}

    def cost(candidate: Row) -> float:
        own = {row.shape: row.us for row in rows if row.solution == candidate.solution}
        known = [own.get(shape) or times.get(shape, {}).get(candidate.solution, 0.0) for shape in best]
        return math.prod(us / best[shape] for us, shape in zip(known, best, strict=True)) if all(known) else math.inf

    costs = [cost(row) for row in rows]
    return rows[-1] if min(costs) == math.inf else rows[costs.index(min(costs))]


def default_of(files: Sequence[Mapping[str, Entry]]) -> dict[str, Entry]:
    """Return the file for all other weights: for each bucket the entry that most files have, the
    first of several.
    """
    keys = sorted({key for file in files for key in file}, key=lambda key: (key == buckets.ANY, buckets.rows_of(key), key))
    default: dict[str, Entry] = {}
    for key in keys:
        texts = Counter(json.dumps(file[key]) for file in files if key in file)
        default[key] = json.loads(texts.most_common(1)[0][0])
    return default


def neighbours_of(folder: Path, name: Name, style: str) -> list[Mapping[str, Entry]]:
    """Return the readable files of single weights in a folder, of the same kernel, architecture and
    style of keys.
    """
    neighbours: list[Mapping[str, Entry]] = []
    for path in sorted(folder.glob(f"{name.gfx}-{name.tag}-*.json")):
        other = json_files.name_of(path)
        if other is not None and other.tag == name.tag and other.gfx == name.gfx and {letter for letter, _ in other.sizes} >= {"N", "K"}:
            with contextlib.suppress(UserError):  # `check` reports a broken one
                entries = json_files.read(path)
                neighbours += [entries] if buckets.style_of(entries) == style else []
    return neighbours


def timed(path: Path, op: Op) -> Timed:
    """Return the times of a trial log or a tuned table, for shapes of an op.

    Raises:
        UserError: the file cannot be read.
    """
    times: Timed = {}

    def note(device: Device, shape: Shape, solution: Solution, us: float) -> None:
        times.setdefault(device, {}).setdefault(shape, {})[solution] = us

    if path.suffix == ".csv":
        for row in read_rows(path, op)[0]:
            if row.valid and row.gfx and row.shape.m:
                note(Device(row.gfx, row.cu_num, row.device), row.shape, row.solution, row.us)
        return times
    for line in read_log(path):
        if line.kind == "trial":
            timing, (device, shape) = line.timing(), line.where()
            if timing.us > 0 and timing.status in ("ok", "screened") and shape.op == op.name:
                note(device, shape, timing.solution, timing.us)
    return times


def timed_by_log_of(table: Path, op: Op) -> Timed:
    """Return the times of the trial log next to a table; none without a log."""
    log = table.parent / f"{table.name.removesuffix('.csv')}.trials.jsonl"
    return timed(log, op) if log.exists() else {}


def times_on(gfx: str, times: Timed) -> Times:
    """Return the times on all devices of an architecture."""
    merged: dict[Shape, dict[Solution, float]] = {}
    for device, by_shape in times.items():
        for shape, us in by_shape.items() if device.gfx == gfx else ():
            merged.setdefault(shape, {}).update(us)
    return merged


def rows_of(entries: Mapping[str, Entry], dialect: Dialect, device: Device, times: Times) -> tuple[list[Row], list[str]]:
    """Return the rows that a file's entries make for timed shapes of its weight, and why other
    shapes have none.

    A row needs a time, which a file does not have: *times* must have one of the solution that the
    file chooses.
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
