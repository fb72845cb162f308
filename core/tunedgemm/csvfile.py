"""Tuned and untuned CSV files of an op: AITER's formats read with tolerance, and rewritten without losing anything."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from tunedgemm.errors import TableError, TunedGemmError
from tunedgemm.row import SYNONYMS, Row, Untuned, blank, key_of, key_shape, own_names, reason, record_of, row_of, sort_key, untuned_of
from tunedgemm.sheet import Record, Sheet, locked, present, read_sheet, replace_text

if TYPE_CHECKING:
    from tunedgemm.ops.op import Op
    from tunedgemm.shape import Shape

__all__ = [
    "Conflict",
    "Problem",
    "Row",
    "Untuned",
    "fold",
    "key_shape",
    "read_rows",
    "read_untuned",
    "rows_of_sheet",
    "upsert",
    "write_rows",
]

#: our columns, appended to AITER's; "" and AITER's filler 0 mean absent
APPENDED = ("device", "layout", "scale", "libver")

#: columns of an untuned file beyond its op's key
UNTUNED_EXTRA = ("count", "graph", "layout", "scale")

#: key columns that a file may lack, as AITER's older files do; the op's parser knows their defaults
_DEFAULTED = ("bias", "dtype", "outdtype", "scaleAB", "bpreshuffle")


@attrs.frozen
class Problem:
    """What is wrong with a line of a file, or with the whole of it (line 0)."""

    path: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}" if self.line else self.reason


@attrs.frozen
class Conflict:
    """Rows of one device and shape that name different solutions: the fastest is kept."""

    kept: Row
    others: tuple[Row, ...]

    def __str__(self) -> str:
        told = ", ".join(f"{row.solution} {row.us:.2f} us ({row.source}:{row.line})" for row in (self.kept, *self.others))
        device = self.kept.device or f"{self.kept.gfx or 'any device'}/{self.kept.cu_num}"
        return f"{self.kept.shape} on {device}: the first of {told}"


def read_rows(path: Path, op: Op) -> tuple[list[Row], list[Problem]]:
    """Read a tuned table. A line that cannot be used is a problem and the others load; a row with a time of 0 or less is both.

    Raises:
        TableError: the file cannot be read, or lacks a column without which no row says anything.
    """
    return rows_of_sheet(path, op, read_sheet(path))


def rows_of_sheet(path: Path, op: Op, sheet: Sheet) -> tuple[list[Row], list[Problem]]:
    """The rows of a tuned file, or of some of its lines below its line of column names; see `read_rows`.

    The records say the numbers of their lines.

    Raises:
        TableError: the sheet lacks a column without which no row says anything.
    """
    rows: list[Row] = []
    problems: list[Problem] = []
    sheet = _as_tuned(path, op, sheet)
    unknown = tuple(column for column in sheet.columns if column not in _order(op, ()))
    for record in sheet.records:
        try:
            row = row_of(path, record, op, unknown)
        except (TunedGemmError, ValueError) as error:
            problems.append(Problem(path, record.line, reason(error)))
            continue
        rows.append(row)
        if not row.valid:
            problems.append(Problem(path, record.line, f"'us' must be above 0 (got {row.us}): the row is never chosen"))
    return rows, problems


def read_untuned(path: Path, op: Op) -> list[Untuned]:
    """Read a list of shapes to tune, in order; rows of one shape are folded and their counts added.

    Raises:
        TableError: the file cannot be read, has a column that means nothing here, or a line that is no shape.
    """
    sheet = read_sheet(path)
    known = (*op.columns.key, *UNTUNED_EXTRA)
    unknown = [column for column in sheet.columns if column not in known]
    if {"libtype", "us"} <= set(unknown):
        raise TableError(f"{path}: is a tuned table, not a list of shapes; name the untuned file, whose columns are {', '.join(known)}")
    if unknown:
        raise TableError(
            f"{path}: unknown column {', '.join(map(repr, unknown))}; an untuned file of {op.name} may have {', '.join(known)}"
        )
    _require(path, sheet, [column for column in op.columns.key if column not in _DEFAULTED])
    counts: dict[Shape, int] = {}
    for record in sheet.records:
        if blank(record):
            continue
        try:
            shape, count = untuned_of(record, op)
        except (TunedGemmError, ValueError) as error:
            raise TableError(f"{path}:{record.line}: {reason(error)}") from None
        counts[shape] = counts.get(shape, 0) + count
    return [Untuned(shape, count) for shape, count in counts.items()]


def write_rows(path: Path, op: Op, rows: Iterable[Row]) -> None:
    """Write a table of these rows in their order, replacing the file.

    Raises:
        TableError: the folder cannot be written.
    """
    records = [record_of(row, op) for row in rows]
    with locked(path):
        replace_text(path, Sheet(_order(op, _columns_of(records)), records).text())


def upsert(path: Path, op: Op, rows: Iterable[Row], sort: bool = True) -> None:
    """Put rows into a table: those of the same device and shape are replaced, all others stay, understood or not.

    A row of AITER's names no device; one that is measured on a device of its kind takes its place, lest the older time win.
    The file is read again under its lock, so that several processes may write one table.

    Args:
        sort: order the file by gfx, cu_num, N, M, K and the rest of the key, as AITER does; else rows keep their places.

    Raises:
        TableError: the file or its folder cannot be read or written; the file is left as it was.
    """
    with locked(path):
        _put(path, op, rows, sort, supersede=True)


def fold(path: Path, op: Op, rows: Iterable[Row], sort: bool = True) -> list[Conflict]:
    """Put the rows of other tables into one: of several for the same device and shape the one with the lowest time stays.

    A row with a time that can never win stays only where there is no other. The file is read under its lock, like `upsert` does.

    Returns:
        Where the rows, those of the file included, named different solutions.

    Raises:
        TableError: the file or its folder cannot be read or written; the file is left as it was.
    """
    conflicts: list[Conflict] = []
    groups: dict[tuple[str, int, str, Shape], list[Row]] = {}
    with locked(path):
        there = read_rows(path, op)[0] if present(path) else []
        for row in [*there, *rows]:
            groups.setdefault(row.key, []).append(row)
        best = {key: min(group, key=lambda row: (not row.valid, row.us if row.valid else 0.0)) for key, group in groups.items()}
        for key, group in groups.items():
            if others := tuple(row for row in group if row.valid and row.solution != best[key].solution):
                conflicts.append(Conflict(best[key], others))
        kept = {id(row) for row in there}
        _put(path, op, [row for row in best.values() if id(row) not in kept], sort, supersede=False)
    return conflicts


def _put(path: Path, op: Op, rows: Iterable[Row], sort: bool, *, supersede: bool) -> None:
    """`upsert` under a lock that is held already; *supersede*: rows that name no device give way, too."""
    fresh = {row.key: record_of(row, op) for row in rows}
    nameless = {(gfx, cu_num, "", shape): (gfx, cu_num, device, shape) for gfx, cu_num, device, shape in fresh} if supersede else {}
    waiting = dict(fresh)
    sheet = _as_tuned(path, op, read_sheet(path)) if present(path) else Sheet([], [])
    records: list[Record] = []
    for record in sheet.records:
        key = key_of(record, op)
        key = nameless.get(key, key) if key is not None else None
        if key is None or key not in fresh:
            records.append(record)
        elif key in waiting:
            records.append(waiting.pop(key))
    records += waiting.values()
    if sort:
        records.sort(key=lambda record: sort_key(record, op))
    columns = _order(op, [*sheet.columns, *_columns_of(records)])
    replace_text(path, Sheet(columns, records).text())


def _as_tuned(path: Path, op: Op, sheet: Sheet) -> Sheet:
    """A tuned file without its blank lines, its columns named as the op names them."""
    own = own_names(op)
    renamed = {column: own.get(SYNONYMS.get(column, column), column) for column in sheet.columns}
    renamed = {old: new for old, new in renamed.items() if old != new and new not in sheet.columns}
    sheet.columns = [renamed.get(column, column) for column in sheet.columns]
    sheet.records = [record for record in sheet.records if not blank(record)]
    if renamed:
        for record in sheet.records:
            record.cells = {renamed.get(column, column): text for column, text in record.cells.items()}
    key = [column for column in op.columns.key if column not in _DEFAULTED]
    time = () if "tflops" in sheet.columns else ("us",)
    _require(path, sheet, [*key, *(own[name] for name in ("libtype", *time) if name in own)])
    return sheet


def _require(path: Path, sheet: Sheet, columns: Iterable[str]) -> None:
    if missing := [column for column in columns if column not in sheet.columns]:
        found = ", ".join(sheet.columns)[:200]
        raise TableError(
            f"{path}: lacks the column {', '.join(map(repr, missing))} (its first line reads {found}); is it a file of another op?"
        )


def _order(op: Op, columns: Iterable[str]) -> list[str]:
    """AITER's columns in AITER's order, ours, then those of *columns* that are neither."""
    return list(dict.fromkeys(("gfx", "cu_num", *op.columns.key, *op.columns.values, *_appended(op), *columns)))


def _appended(op: Op) -> tuple[str, ...]:
    return APPENDED if "libtype" in op.columns.values else ("libtype", *APPENDED)


def _columns_of(records: Iterable[Record]) -> list[str]:
    return list(dict.fromkeys(column for record in records for column in record.cells))
