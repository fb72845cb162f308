"""``table merge``: the tables of shards and machines in one."""

from __future__ import annotations

import argparse

from tunedgemm.cli.table.files import op_of
from tunedgemm.errors import TableError
from tunedgemm.table.csvfile import fold, read_rows
from tunedgemm.table.folders import named_file
from tunedgemm.table.row import Row


def run(arguments: argparse.Namespace) -> int:
    """Fold tables into one, after reading every input; return 1 if a line could not be read."""
    rows: list[Row] = []
    lost = 0
    files = [named_file(text) for text in arguments.inputs]
    if arguments.output.resolve() in [file.resolve() for file in files]:
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
    return 1 if lost else 0
