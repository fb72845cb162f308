"""Tuned and untuned CSV files of an op: AITER's formats read with tolerance, and rewritten without losing anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from tunedgemm.errors import TableError, TunedGemmError, UserError
from tunedgemm.ops import DEFAULT_OP, op_named, ops
from tunedgemm.table.columns import (
    SYNONYMS,
    UNTUNED_EXTRA,
    appended,
    foreign_columns,
    in_order,
    is_of_aiter,
    is_tuned,
    look_alikes,
    measures,
    own_names,
    sizes,
    told_alike,
    unknown_columns,
)
from tunedgemm.table.folders import is_table_name
from tunedgemm.table.row import (
    Row,
    Untuned,
    blank,
    key_of,
    key_shape,
    reason,
    record_of,
    record_of_untuned,
    rows_of,
    sort_key,
    stray_columns,
    untuned_of,
)
from tunedgemm.table.sheet import Record, Sheet, locked, present, read_sheet, replace_text

if TYPE_CHECKING:
    from tunedgemm.ops.op import Op
    from tunedgemm.shape import Shape

__all__ = [
    "Conflict",
    "Problem",
    "Row",
    "Untuned",
    "fold",
    "infer_op",
    "key_shape",
    "read_listed",
    "read_rows",
    "read_tuned",
    "read_untuned",
    "rows_of_sheet",
    "untuned_text",
    "upsert",
    "write_rows",
    "write_untuned",
]


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
        TableError: the file cannot be read, lacks a column without which no row says anything, or
            is another op's.
    """
    sheet = read_sheet(path)
    columns = sheet.columns
    found = rows_of_sheet(path, op, sheet)
    _judge_rows(path, op, sheet, columns)
    return found


def rows_of_sheet(path: Path, op: Op, sheet: Sheet) -> tuple[list[Row], list[Problem]]:
    """The rows of a tuned file, or of some of its lines below its line of column names; see `read_rows`.

    The records say the numbers of their lines. A line is one row, but for the short form; see
    `rows_of`.

    Raises:
        TableError: the sheet lacks a column without which no row says anything.
    """
    rows: list[Row] = []
    problems: list[Problem] = []
    _know_columns(path, op, sheet)
    unknown = unknown_columns(op, sheet.columns)
    for record in sheet.records:
        if blank(record):
            continue
        try:
            found = rows_of(path, record, op, unknown)
        except (TunedGemmError, ValueError) as error:
            problems.append(Problem(path, record.line, reason(error)))
            continue
        rows += found
        if not found[0].valid:
            problems.append(
                Problem(path, record.line, f"'us' must be a finite number above 0 (got {found[0].us}): the row is never chosen")
            )
    return rows, problems


def read_untuned(path: Path, op: Op) -> list[Untuned]:
    """Read a list of shapes to tune, in order; rows of one shape are folded and their counts added.

    Raises:
        TableError: the file cannot be read, has a column that means nothing here, or a line that is
            no shape.
    """
    found, problems = _untuned_of_sheet(path, op, read_sheet(path))
    if problems:
        raise TableError(str(problems[0]))
    return found


def read_listed(path: Path, op: Op) -> tuple[list[Untuned], list[Problem]]:
    """`read_untuned` of a file some of whose lines may be broken, the last one cut off: each is a problem, the others are read.

    Raises:
        TableError: the file cannot be read, or has a column that means nothing here.
    """
    sheet = read_sheet(path, whole=False)
    found, problems = _untuned_of_sheet(path, op, sheet)
    return found, problems + ([Problem(path, *sheet.cut)] if sheet.cut else [])


def _untuned_of_sheet(path: Path, op: Op, sheet: Sheet) -> tuple[list[Untuned], list[Problem]]:
    """The shapes of a sheet, folded, and the lines that are none."""
    _refuse_other_separators(path, sheet.columns)
    known = tuple(dict.fromkeys((*op.columns.key, *op.columns.own, *UNTUNED_EXTRA)))
    unknown = [column for column in sheet.columns if column not in known]
    if is_tuned(unknown):
        raise TableError(f"{path}: is a tuned table, not a list of shapes; name the untuned file, whose columns are {', '.join(known)}")
    if unknown:
        raise TableError(
            f"{path}: unknown column {', '.join(map(repr, unknown))}; an untuned file of {op.name} may have {', '.join(known)}"
            f"{told_alike(op, sheet.columns)}"
        )
    _require(path, op, sheet.columns, [column for column in sizes(op) if column not in sheet.columns])
    folded: dict[Shape, Untuned] = {}
    problems: list[Problem] = []
    for record in sheet.records:
        if blank(record):
            continue
        try:
            line = untuned_of(record, op)
        except (TunedGemmError, ValueError) as error:
            problems.append(Problem(path, record.line, reason(error)))
            continue
        earlier = folded.get(line.shape)
        calls = (line.count, line.graph) if earlier is None else (earlier.count + line.count, earlier.graph + line.graph)
        folded[line.shape] = attrs.evolve(earlier or line, count=calls[0], graph=calls[1])
    return list(folded.values()), problems


def untuned_text(op: Op, rows: Iterable[Untuned]) -> str:
    """A list of shapes to tune as the text of a CSV, in their order; a column in which nobody says anything is left out."""
    records = [record_of_untuned(row, op) for row in rows]
    said = {column for record in records for column in record.cells}
    return Sheet([*op.columns.key, *(column for column in (*op.columns.own, *UNTUNED_EXTRA) if column in said)], records).text()


def write_untuned(path: Path, op: Op, rows: Iterable[Untuned]) -> None:
    """Write a list of shapes to tune, replacing the file; see `untuned_text`.

    Raises:
        TableError: the folder cannot be written.
    """
    text = untuned_text(op, rows)
    with locked(path):
        replace_text(path, text)


def write_rows(path: Path, op: Op, rows: Iterable[Row]) -> None:
    """Write a table of these rows in their order, replacing the file.

    Raises:
        TableError: the folder cannot be written.
    """
    records = [record_of(row, op) for row in rows]
    with locked(path):
        replace_text(path, Sheet(in_order(op, _columns_of(records)), records).text())


def upsert(path: Path, op: Op, rows: Iterable[Row], sort: bool = True) -> None:
    """Put rows into a table: those of the same device and shape are replaced, all others stay, understood or not.

    A row of AITER's names no device; one that is measured on a device of its kind takes its place,
    lest the older time win. The file is read again under its lock, so that several processes may
    write one table.

    Args:
        sort: order the file by gfx, cu_num, N, M, K and the rest of the key, as AITER does; else
            rows keep their places.

    Raises:
        TableError: the file or its folder cannot be read or written; the file is left as it was.
    """
    with locked(path):
        _put(path, op, rows, sort, supersede=True)


def fold(path: Path, op: Op, rows: Iterable[Row], sort: bool = True) -> list[Conflict]:
    """Put the rows of other tables into one: of several for the same device and shape the one with the lowest time stays.

    A row with a time that can never win stays only where there is no other. The file is read under
    its lock, like `upsert` does.

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
    """`upsert` under a lock that is held already; *supersede*: rows that name no device give way, too.

    A line that says already what its row says keeps its text, as every other line does.
    """
    fresh = {row.key: row for row in rows}
    nameless = {(gfx, cu_num, "", shape): (gfx, cu_num, device, shape) for gfx, cu_num, device, shape in fresh} if supersede else {}
    waiting = dict(fresh)
    sheet = read_tuned(path, op) if present(path) else Sheet([], [])
    unknown = unknown_columns(op, sheet.columns)
    records: list[Record] = []
    for record in sheet.records:
        key = None if blank(record) else key_of(record, op)
        key = nameless.get(key, key) if key is not None else None
        if key is None or key not in fresh:
            records.append(record)
        elif key in waiting:
            row = waiting.pop(key)
            records.append(record if _says(path, record, op, unknown, row) else record_of(row, op))
    records += [record_of(row, op) for row in waiting.values()]
    if sort:
        records = sorted((record for record in records if not blank(record)), key=lambda record: sort_key(record, op))
    sheet.records = records
    sheet.columns = _widened(op, sheet.columns, records) if sheet.columns else in_order(op, _columns_of(records))
    replace_text(path, sheet.text())


def _says(path: Path, record: Record, op: Op, unknown: tuple[str, ...], row: Row) -> bool:
    """Whether a line says this row and nothing else."""
    try:
        return rows_of(path, record, op, unknown) == [row]
    except (TunedGemmError, ValueError):
        return False


def read_tuned(path: Path, op: Op) -> Sheet:
    """A tuned file, its columns known by the op's names; lines that say nothing (`blank`) are among its records.

    Raises:
        TableError: as `read_rows`.
    """
    sheet = read_sheet(path)
    columns = sheet.columns
    _know_columns(path, op, sheet)
    _judge_rows(path, op, sheet, columns)
    return sheet


def _know_columns(path: Path, op: Op, sheet: Sheet) -> None:
    """Call a tuned file's columns as the op does; raises TableError where they are not such a file's."""
    own, columns = own_names(op.columns), sheet.columns
    _refuse_other_separators(path, columns)
    renamed = {column: own.get(SYNONYMS.get(column, column), SYNONYMS.get(column, column)) for column in sheet.columns}
    taken = (*op.columns.key, *op.columns.values, *appended(op))
    renamed = {old: new for old, new in renamed.items() if old != new and new in taken and new not in sheet.columns}
    sheet.rename(renamed)
    if not is_tuned(sheet.columns):
        twin = f" and {op.columns.untuned_file} the list of shapes to tune"
        lacks = f"lacks the column {', '.join(map(repr, measures(op)))}"
        if set(sheet.columns) <= {*op.columns.key, *op.columns.own, *UNTUNED_EXTRA}:
            raise TableError(f"{path}: is a list of shapes, not a tuned table: {lacks}; {op.columns.tuned_file} is a table{twin}")
    needed = [column for column in measures(op) if column != own["us"] or "tflops" not in sheet.columns]
    _require(path, op, columns, [column for column in (*sizes(op), *needed) if column not in sheet.columns])
    exact = [name for name in look_alikes(columns) if is_of_aiter(columns, ops()[name])]
    if exact and op.name not in exact and not set(foreign_columns(op)) & set(columns):
        raise TableError(f"{path}: is no table of {op.name}{told_alike(op, columns)}")


def _judge_rows(path: Path, op: Op, sheet: Sheet, columns: Sequence[str]) -> None:
    """Raise TableError for a file of these *columns* whose rows are all another op's; a single such row is left out alone."""
    foreign = [column for column in foreign_columns(op) if column in columns]
    if not foreign or op.name in look_alikes(columns):
        return
    lines = [record for record in sheet.records if record.cells and not blank(record)]
    if lines and all(stray_columns(record, op) for record in lines):
        raise TableError(f"{path}: is no table of {op.name}, which has no {', '.join(map(repr, foreign))}{told_alike(op, columns)}")


def infer_op(paths: Iterable[Path]) -> Op:
    """The op whose tables or lists of shapes these files are: by their names, where their columns leave several.

    A file whose columns are not exactly AITER's, or that lists M, N and K alone, is of a16w16 where
    it may be.

    Raises:
        TableError: a file cannot be read.
        UserError: several ops have such columns and no name tells which, or the files are of
            several ops.
    """
    found: dict[str, Path] = {}
    for path in paths:
        columns = read_sheet(path, whole=False).columns
        alike = look_alikes(columns)
        named = [name for name in alike if is_table_name(path.name, ops()[name])]
        loose = not is_tuned(columns) or not any(is_of_aiter(columns, ops()[name]) for name in alike)
        if len(named or alike) == 1:
            found.setdefault((named or alike)[0], path)
        elif not alike or (loose and not set(foreign_columns(op_named(DEFAULT_OP))) & set(columns)):
            found.setdefault(DEFAULT_OP, path)
        else:
            raise UserError(f"{path}: the columns are those of {' and of '.join(alike)}; name one with --op")
    if len(found) > 1:
        told = ", ".join(f"{path} of {name}" for name, path in found.items())
        raise UserError(f"these are files of several ops ({told}): give those of one, or name it with --op")
    return op_named(next(iter(found), DEFAULT_OP))


def _require(path: Path, op: Op, columns: Sequence[str], missing: Sequence[str]) -> None:
    if missing:
        raise TableError(
            f"{path}: lacks the column{'s' if len(missing) > 1 else ''} {', '.join(map(repr, missing))} "
            f"(its first line reads {', '.join(columns)[:200]}); "
            f"is it a file of another op than {op.name}?{told_alike(op, columns)}"
        )


def _refuse_other_separators(path: Path, columns: Sequence[str]) -> None:
    """Raise TableError for a file whose fields tabs or the like part."""
    if mark := next((mark for mark in "\t;|" if len(columns) == 1 and mark in columns[0]), ""):
        raise TableError(f"{path}: its fields are parted by {mark!r}; a table is a CSV file, whose fields are parted by commas")


def _widened(op: Op, columns: Sequence[str], records: Iterable[Record]) -> list[str]:
    """The columns of a file, then those it lacks in which a record says something, in our order."""
    said = {column for record in records for column, text in record.cells.items() if text and column not in columns}
    return [*columns, *(column for column in in_order(op, sorted(said)) if column in said)]


def _columns_of(records: Iterable[Record]) -> list[str]:
    return list(dict.fromkeys(column for record in records for column in record.cells))
