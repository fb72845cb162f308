"""Tuned CSV files: read AITER's formats tolerantly, rewrite losslessly."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from tunedgemm.errors import TableError, TunedGemmError, UserError
from tunedgemm.ops import DEFAULT_OP, op_named, ops
from tunedgemm.ops.scale_order import of_any_m
from tunedgemm.table.bit_classes import one_class, pins_of
from tunedgemm.table.columns import (
    BIT_CLASS,
    DEVICE,
    UNTUNED_EXTRA,
    columns_of_others,
    fits,
    foreign_columns,
    in_order,
    is_of_aiter,
    is_tuned,
    look_alikes,
    measures,
    other_ops_hint,
    own_names,
    sizes,
    synonyms,
    unknown_columns,
)
from tunedgemm.table.folders import is_table_name
from tunedgemm.table.published import provenance_of, refuse_published
from tunedgemm.table.row import (
    Row,
    RowReader,
    blank,
    key_of,
    key_shape,
    own_cell,
    reason,
    record_of,
    rows_of,
    sort_key,
    stray_columns,
)
from tunedgemm.table.sheet import Record, Sheet, as_text, format_line, locked, parse_sheet, present, read_content, read_sheet, replace_text
from tunedgemm.text.printable import printable_line

if TYPE_CHECKING:
    from tunedgemm.ops.op import Op
    from tunedgemm.shape import Shape

__all__ = [
    "Conflict",
    "Problem",
    "Row",
    "fold",
    "infer_op",
    "key_shape",
    "problem_lines",
    "read_rows",
    "read_tuned",
    "name_columns",
    "rows_of_records",
    "upsert",
    "write_rows",
]


_log = logging.getLogger("tunedgemm")


@attrs.frozen
class Problem:
    """A fault in a line of a file, or in the whole file (line 0)."""

    path: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return printable_line(f"{self.path}:{self.line}: {self.reason}" if self.line else self.reason)


def problem_lines(problems: Iterable[Problem]) -> list[str]:
    """Format problems, grouped by reason: ``file:2-4,9: reason``."""
    grouped: dict[tuple[Path, str], list[int]] = {}
    for problem in problems:
        grouped.setdefault((problem.path, problem.reason), []).append(problem.line)
    return [printable_line(f"{path}:{_ranges(lines)}: {reason}") for (path, reason), lines in grouped.items()]


def _ranges(lines: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for line in lines:
        if runs and line == runs[-1][-1] + 1:
            runs[-1][1:] = [line]
        else:
            runs.append([line])
    return ",".join("-".join(map(str, run)) for run in runs)


@attrs.frozen
class Conflict:
    """Rows of one device and shape with different solutions, of which the fastest is kept."""

    kept: Row
    others: tuple[Row, ...]

    def __str__(self) -> str:
        rows = ", ".join(f"{row.solution} {row.us:.2f} us ({row.source}:{row.line})" for row in (self.kept, *self.others))
        device = self.kept.device or f"{self.kept.gfx or 'any device'}/{self.kept.cu_num}"
        return printable_line(f"{self.kept.shape} on {device}: the first of {rows}")


def read_rows(path: Path, op: Op) -> tuple[list[Row], list[Problem]]:
    """Read a tuned table; an unusable line becomes a problem.

    A row with a time of 0 or less is both a row and a problem.

    Raises:
        TableError: the file cannot be read, lacks a required column, or is another op's.
    """
    return rows_of_content(path, op, read_content(path))


def rows_of_content(path: Path, op: Op, content: bytes) -> tuple[list[Row], list[Problem]]:
    """Return the rows of a tuned table's bytes; see `read_rows`."""
    sheet = parse_sheet(path, as_text(path, content))
    columns = sheet.columns
    name_columns(path, op, sheet)
    rows_and_problems = rows_of_records(path, op, sheet.records, unknown_columns(op, sheet.columns))
    _judge_rows(path, op, sheet, columns)
    return rows_and_problems


def rows_of_records(path: Path, op: Op, records: Iterable[Record], unknown: Collection[str]) -> tuple[list[Row], list[Problem]]:
    """Return the rows of lines whose columns have the op's names; see `read_rows`.

    A line is one row, except in the short form; see `rows_of`.
    """
    reader = RowReader(path, op, unknown)
    rows: list[Row] = []
    problems: list[Problem] = []
    for record in records:
        if blank(record):
            continue
        try:
            parsed = reader.rows(record)
        except (TunedGemmError, ValueError) as error:
            problems.append(Problem(path, record.line, reason(error)))
            continue
        rows += parsed
        if not parsed[0].valid:
            problems.append(
                Problem(path, record.line, f"'us' must be a finite number above 0 (got {parsed[0].us}); the row is never chosen")
            )
    return rows, problems


def write_rows(path: Path, op: Op, rows: Iterable[Row]) -> None:
    """Write rows in order, replacing the file.

    A row that would not be read back unchanged is skipped and logged as an error.

    Raises:
        TableError: the folder cannot be written.
    """
    records = list(filter(None, (_kept_record(path, op, row) for row in rows)))
    with locked(path):
        replace_text(path, Sheet(in_order(op, _columns_of(records)), records).text())


def upsert(path: Path, op: Op, rows: Iterable[Row], sort: bool = True) -> None:
    """Insert rows into a table, replacing rows of the same device and shape.

    Other lines are kept. A row of AITER, which names no device, is replaced by one measured on a
    device of its kind, because its older time could win. The file is read under its lock, so that
    several processes can write one table. A row that would not be read back unchanged is skipped
    and logged as an error.

    Args:
        sort: sort the file by gfx, cu_num, N, M, K and the rest of the key, as AITER does; else
            rows keep their positions.

    Raises:
        TableError: the file or its folder cannot be read or written; the file is unchanged.
    """
    with locked(path):
        _upsert_locked(path, op, rows, sort, supersede=True)


def fold(path: Path, op: Op, rows: Iterable[Row], sort: bool = True) -> list[Conflict]:
    """Merge rows into a table, keeping the fastest row per device and shape.

    A row with an invalid time is kept only if none is valid. Each group keeps the rows of one bit
    class, see `one_class`. The file is read under its lock, as in
    `upsert`.

    Returns:
        The conflicts between rows, including those of the file.

    Raises:
        TableError: the file or its folder cannot be read or written; the file is unchanged.
    """
    conflicts: list[Conflict] = []
    groups: dict[tuple[str, int, str, Shape], list[Row]] = {}
    with locked(path):
        existing = read_rows(path, op)[0] if present(path) else []
        every = [*existing, *rows]
        for row in every:
            groups.setdefault(row.key, []).append(row)
        allowed, pins = {id(row) for row in one_class(every)}, pins_of(every)
        able = {key: [row for row in group if id(row) in allowed] for key, group in groups.items()}
        best = {key: min(group, key=lambda row: (not row.valid, row.us if row.valid else 0.0)) for key, group in able.items() if group}
        for key, group in groups.items():
            kept = best.get(key) or pins[group[0].group]  # a group keeps one class: that of its row for any M
            if others := tuple(row for row in group if row.valid and (key not in best or row.solution != kept.solution)):
                conflicts.append(Conflict(kept, others))
        present_rows = {id(row) for row in existing}
        _upsert_locked(path, op, [row for row in best.values() if id(row) not in present_rows], sort, supersede=False)
    return conflicts


def _upsert_locked(path: Path, op: Op, rows: Iterable[Row], sort: bool, *, supersede: bool) -> None:
    """Do `upsert` under a held lock; with *supersede*, also replace rows without a device.

    Unchanged lines keep their text. Lines of another bit class than their group's new rows go.
    """
    refuse_published(path)
    fresh = {row.key: row for row in rows}
    nameless = {(gfx, cu_num, "", shape): (gfx, cu_num, device, shape) for gfx, cu_num, device, shape in fresh} if supersede else {}
    classes = {row.group: row.bit_class for row in fresh.values() if row.bit_class}
    waiting = dict(fresh)
    sheet = read_tuned(path, op) if present(path) else Sheet([], [])
    unknown = unknown_columns(op, sheet.columns)
    records: list[Record] = []
    for record in sheet.records:
        key = None if blank(record) else key_of(record, op)
        key = nameless.get(key, key) if key is not None else None
        if key is None or key not in fresh:
            group = classes.get((*key[:3], of_any_m(key[3]))) if key is not None and classes else None
            if group is None or own_cell(record.cells, BIT_CLASS) in ("", group):
                records.append(record)
        elif key in waiting:
            row = waiting.pop(key)
            records.append(record if _is_this_row(path, record, op, unknown, row) else _kept_record(path, op, row, sheet.columns) or record)
    end = next((at for at in range(len(records), 0, -1) if not records[at - 1].is_comment), 0)  # trailing comments stay at the end
    records[end:end] = filter(None, (_kept_record(path, op, row, sheet.columns) for row in waiting.values()))
    sheet.records = _in_order(records, op) if sort else records
    sheet.columns = _widen(op, sheet.columns, records) if sheet.columns else in_order(op, _columns_of(records))
    replace_text(path, sheet.text())


def _in_order(records: Iterable[Record], op: Op) -> list[Record]:
    """Sort lines like AITER, without empty ones; a comment stays above its line."""
    groups: list[list[Record]] = [[]]
    for record in records:
        if record.is_comment or not blank(record):
            groups[-1].append(record)
        if not blank(record):
            groups.append([])
    *groups, last = groups
    return [record for group in sorted(groups, key=lambda group: sort_key(group[-1], op)) for record in group] + last


def _kept_record(path: Path, op: Op, row: Row, columns: Sequence[str] = ()) -> Record | None:
    """Return a row's record; log an error and return None if it would not be read back unchanged."""
    record = record_of(row, op)
    try:
        format_line(record, in_order(op, record.cells) if not columns else list(dict.fromkeys((*columns, *record.cells))))
        if not row.line:  # a row of a file was read that way already
            rows_of(path, record, op)
    except (TunedGemmError, ValueError) as error:
        _log.error("%s: left out: the row of %s for %s: %s", path, row.solution, row.shape, reason(error))
        return None
    return record


def _is_this_row(path: Path, record: Record, op: Op, unknown: Collection[str], row: Row) -> bool:
    try:
        return rows_of(path, record, op, unknown) == [row]
    except (TunedGemmError, ValueError):
        return False


def read_tuned(path: Path, op: Op) -> Sheet:
    """Read a tuned file, with the op's names of columns; empty lines are kept as records.

    Raises:
        TableError: as in `read_rows`.
    """
    sheet = read_sheet(path)
    columns = sheet.columns
    name_columns(path, op, sheet)
    _judge_rows(path, op, sheet, columns)
    return sheet


def name_columns(path: Path, op: Op, sheet: Sheet) -> None:
    """Rename a tuned file's columns to the op's names; raise TableError for another kind of file."""
    own, columns = own_names(op.columns), sheet.columns
    refuse_other_separators(path, columns)
    sheet.rename(synonyms(op, columns))
    if not is_tuned(sheet.columns):
        twin = f" and {op.columns.untuned_file} the list of shapes to tune"
        lacks = f"it lacks the column {', '.join(map(repr, measures(op)))}"
        if set(sheet.columns) <= {*op.columns.key, *op.columns.own, *UNTUNED_EXTRA, *DEVICE}:
            raise TableError(f"{path}: a list of shapes, not a tuned table: {lacks}; {op.columns.tuned_file} is a table{twin}")
    needed = [column for column in measures(op) if column != own["us"] or "tflops" not in sheet.columns]
    require_columns(path, op, columns, [column for column in (*sizes(op), *needed) if column not in sheet.columns])
    exact = [name for name in look_alikes(columns) if is_of_aiter(columns, ops()[name])]
    if exact and op.name not in exact and not set(foreign_columns(op)) & set(columns):
        raise TableError(f"{path}: not a table of {op.name}{other_ops_hint(op, columns)}")


def _judge_rows(path: Path, op: Op, sheet: Sheet, columns: Sequence[str]) -> None:
    """Raise TableError if all rows are another op's; single ones are only skipped."""
    foreign = [column for column in foreign_columns(op) if column in columns]
    if not foreign or op.name in look_alikes(columns):
        return
    lines = [record for record in sheet.records if record.cells and not blank(record)]
    if lines and all(stray_columns(record, op) for record in lines):
        raise TableError(f"{path}: not a table of {op.name}, which has no {', '.join(map(repr, foreign))}{other_ops_hint(op, columns)}")


def infer_op(paths: Iterable[Path]) -> Op:
    """Infer the op of tables or lists of shapes by their columns, then by their names.

    A published table states its op. A file with only M, N and K, or with other columns than
    AITER's, is assumed to be a16w16 unless that has no such column.

    Raises:
        TableError: a file cannot be read.
        UserError: the op is ambiguous, or the files are of several ops.
    """
    by_op: dict[str, Path] = {}
    for path in paths:
        if stated := provenance_of(path):
            by_op.setdefault(op_named(stated.op).name, path)
            continue
        columns = read_sheet(path, whole=False).columns
        alike = look_alikes(columns)
        readers = alike if is_tuned(columns) or len(alike) == 1 else [op.name for op in ops().values() if fits(columns, op)]
        named = [name for name in readers if is_table_name(path.name, ops()[name])]
        loose = not is_tuned(columns) or not any(is_of_aiter(columns, ops()[name]) for name in alike)
        if len(named or alike) == 1:
            by_op.setdefault((named or alike)[0], path)
        elif not alike or (loose and not set(columns_of_others(op_named(DEFAULT_OP))) & set(columns)):
            by_op.setdefault(DEFAULT_OP, path)
        else:
            having = [name for name in alike if not set(columns_of_others(ops()[name])) & set(columns)] or alike
            raise UserError(f"{path}: the columns fit {' and '.join(having)}; name one with --op")
    if len(by_op) > 1:
        listed = ", ".join(f"{path} of {name}" for name, path in by_op.items())
        raise UserError(f"the files are of several ops ({listed}); pass those of one, or name it with --op")
    return op_named(next(iter(by_op), DEFAULT_OP))


def require_columns(path: Path, op: Op, columns: Sequence[str], missing: Sequence[str]) -> None:
    """Raise TableError if required columns are missing, with a hint to the right op."""
    if missing:
        spelt = {column: other for column in missing for other in columns if other.lower() == column.lower()}
        if spelt.keys() >= {*missing}:
            raise TableError(
                f"{path}: columns of {op.name} are spelt otherwise (got {', '.join(spelt.values())}); "
                f"write {', '.join(spelt)}, where these are the sizes of row-major products"
            )
        raise TableError(
            f"{path}: lacks the column{'s' if len(missing) > 1 else ''} {', '.join(map(repr, missing))} "
            f"(got {', '.join(columns)[:200]}); "
            f"is it a file of another op than {op.name}?{other_ops_hint(op, columns)}"
        )


def refuse_other_separators(path: Path, columns: Sequence[str]) -> None:
    """Raise TableError for a file whose separator is not a comma."""
    if mark := next((mark for mark in "\t;|" if len(columns) == 1 and mark in columns[0]), ""):
        raise TableError(f"{path}: fields must be separated by commas (got {mark!r}); save the file as CSV")


def _widen(op: Op, columns: Sequence[str], records: Iterable[Record]) -> list[str]:
    """Return the columns of a file and, in our order, further ones that records fill."""
    own = set(columns)
    filled = {column for record in records for column, text in record.cells.items() if text and column not in own}
    return [*columns, *(column for column in in_order(op, sorted(filled)) if column in filled)]


def _columns_of(records: Iterable[Record]) -> list[str]:
    return list(dict.fromkeys(column for record in records for column in record.cells))
