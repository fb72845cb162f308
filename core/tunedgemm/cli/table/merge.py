"""``table merge``: the tables of shards and machines in one."""

from __future__ import annotations

import argparse
import os

from tunedgemm.cli.table.files import op_of
from tunedgemm.errors import TableError
from tunedgemm.table.csvfile import fold, read_rows
from tunedgemm.table.folders import named_file
from tunedgemm.table.row import Row
from tunedgemm.table.sheet import present


def run(arguments: argparse.Namespace) -> int:
    """Fold tables into one, after reading every input.

    As in AITER, a missing input is named and left out.

    Returns:
        1 if a line could not be read, or if tables differ on a device and shape; else 0.
    """
    rows: list[Row] = []
    lost = 0
    named = [named_file(text) for text in arguments.inputs]
    files = [file for file in named if present(file)]
    if not files:
        raise TableError(f"{', '.join(map(str, named))}: no such file; name the tables to merge")
    for file in named:
        if file not in files:
            print(f"left out: {file}: no such file")
    if os.path.realpath(arguments.output) in map(os.path.realpath, files):
        raise TableError(f"{arguments.output}: is both OUT and IN; name it once, because OUT keeps its rows")
    op = op_of(arguments, files)
    for file in files:
        read, problems = read_rows(file, op)
        understood = {row.line for row in read}
        for problem in problems:
            unread = problem.line not in understood
            lost += unread
            print(f"left out: {problem}" if unread else f"note: {problem}")
        print(f"{file}: {len(read)} rows")
        rows += read
    conflicts = fold(arguments.output, op, rows, sort=arguments.sort)
    for conflict in conflicts:
        print(f"conflict, the lowest time stays: {conflict}")
    kept, _ = read_rows(arguments.output, op)
    print(f"{arguments.output}: {len(kept)} rows, {len(conflicts)} conflicts, {lost} lines left out")
    return 1 if lost or conflicts else 0
