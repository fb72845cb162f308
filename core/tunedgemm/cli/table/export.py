"""``table export --aiter``: a table that AITER reads, with one row for each of AITER's keys."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tunedgemm.backends import split_bias
from tunedgemm.cli.table.files import op_of
from tunedgemm.errors import TableError
from tunedgemm.libtypes import AITER, JOINT, OF_AITERS_OPS, libtype_of_kernel
from tunedgemm.ops.op import Op
from tunedgemm.solution import ADD
from tunedgemm.table.csvfile import Problem, read_rows
from tunedgemm.table.folders import named_file, table_layers
from tunedgemm.table.row import Row, record_of, shape_cells, sort_key
from tunedgemm.table.sheet import Record, Sheet, locked, present, replace_text
from tunedgemm.text.cell import is_formula


def run(arguments: argparse.Namespace) -> int:
    """Write the winning row of each of AITER's keys; count the rows left out, with the reasons."""
    out = arguments.aiter
    if present(out):
        raise TableError(f"{out}: exists already; name a new file, or delete this one")
    files = [named_file(text) for text in arguments.inputs]
    op = op_of(arguments, files)
    if not OF_AITERS_OPS.get(op.name, AITER):
        raise TableError(f"{op.name}: AITER has no table of this op")
    unread: list[Problem] = []
    layers = [_read(files, op, unread)] if files else list(_layers(op, unread))
    columns = ["gfx", "cu_num", *op.columns.key, *op.columns.values]
    kept: dict[tuple[str, ...], Record] = {}
    left: Counter[str] = Counter()
    for rows in layers:
        for row in sorted(rows, key=lambda row: (not row.valid, row.us)):
            if why := _unfit(row, op):
                left[why] += 1
                continue
            record = record_of(row, op)
            key = tuple(record.cells[column] for column in columns[: 2 + len(op.columns.key)])
            if key in kept:
                left["a better row has AITER's key"] += 1
            else:
                kept[key] = record
    records = sorted(kept.values(), key=lambda record: sort_key(record, op))
    with locked(out):
        replace_text(out, Sheet(columns, records).text())
    for problem in unread:
        print(f"left out: {problem}")
    print(f"{out}: {len(kept)} rows of {op.name}")
    for why, count in left.most_common():
        print(f"left out: {count} rows: {why}")
    return 1 if unread else 0


def _read(paths: Iterable[Path], op: Op, unread: list[Problem]) -> list[Row]:
    """Return the rows of files, those that never win included; append unreadable lines to *unread*."""
    rows: list[Row] = []
    for path in paths:
        read, problems = read_rows(path, op)
        lines = {row.line for row in read}
        rows += read
        unread += [problem for problem in problems if problem.line not in lines]
    return rows


def _layers(op: Op, unread: list[Problem]) -> Iterator[Sequence[Row]]:
    """Yield the rows of each layer that dispatch uses, highest first."""
    for layer in table_layers(op):
        yield _read([path for path in layer.paths if layer.named_by_user or present(path)], op, unread)


def _unfit(row: Row, op: Op) -> str:
    """Return why AITER cannot use a row, or ""."""
    if not row.valid:
        return "the time never wins"
    if row.bit_class:
        return "a row of a bit class"
    if row.shape.m == 0:
        return "M=0 pins every M"
    if not row.gfx or not row.cu_num:
        return "no device is named"
    if split_bias.is_split(row.solution):
        return f"AITER adds no bias after a kernel ({ADD})"
    libtypes = OF_AITERS_OPS.get(op.name, AITER)
    foreign = [part for part in row.solution.libtype.split(JOINT) if part not in libtypes]
    if foreign:
        return f"libtype {foreign[0]} is not AITER's" + (f" for {op.name}" if foreign[0] in AITER else "")
    if "libtype" not in op.columns.values and _libtype_from_names(row, op) != row.solution.libtype:
        return f"AITER has no column for libtype {row.solution.libtype}, and the kernel's name means another libtype"
    if formulas := [text for text in record_of(row, op).cells.values() if is_formula(text)]:
        return f"a spreadsheet would run a cell that begins with {formulas[0].strip()[0]}"
    texts = shape_cells(row.shape, op, row.gfx)
    own = [column for column in op.columns.own if texts.get(column, "")]
    return f"AITER's key lacks {' and '.join(own)}" if own else ""


def _libtype_from_names(row: Row, op: Op) -> str:
    """Return the libtype that AITER derives for a row without a libtype column."""
    cells = {column: text for column, text in record_of(row, op).cells.items() if column in op.columns.values}
    common = op.columns.read(cells)
    return common.get("libtype", "") or libtype_of_kernel(common.get("kernelName", cells.get("kernelName", "")))
