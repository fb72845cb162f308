"""``table diff``: the differences between the best rows of two tables."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from tunedgemm.cli.table.files import op_of, shape_text, solution_text
from tunedgemm.shape import Shape
from tunedgemm.table.csvfile import read_rows
from tunedgemm.table.folders import named_file
from tunedgemm.table.row import Row

#: Digits of a time in microseconds that tables keep.
DIGITS = 4

Key = tuple[str, int, str, Shape]


def run(arguments: argparse.Namespace) -> int:
    """Compare the best row of each device and shape; return 1 if any differs."""
    files = [named_file(arguments.first), named_file(arguments.second)]
    op = op_of(arguments, files)
    first, second = (_winning_rows(read_rows(file, op)[0]) for file in files)
    sides = (files[0], first, second), (files[1], second, first)
    alone = [(file, row) for file, rows, others in sides for row in _rows_only_in(rows, others)]
    for file, row in alone:
        print(f"only in {file}: {shape_text(row)}: {solution_text(row)}")
    winners = times = 0
    for key, row in first.items():
        other = second.get(key, row)
        if other.solution != row.solution:
            winners += 1
            print(f"another winner: {shape_text(row)}: {solution_text(row)} -> {solution_text(other)}")
        elif round(other.us, DIGITS) != round(row.us, DIGITS):
            times += 1
            print(f"another time: {shape_text(row)}: {solution_text(row)} -> {other.us:.2f} us ({100 * (other.us / row.us - 1):+.1f} %)")
    same = len(first.keys() & second.keys()) - winners - times
    only = [sum(file == path for file, _ in alone) for path in files]
    print(f"{same} equal, {winners} other winners, {times} other times, {only[0]} only in {files[0]}, {only[1]} only in {files[1]}")
    return 1 if winners or times or alone else 0


def _winning_rows(rows: Iterable[Row]) -> dict[Key, Row]:
    """Return the winning row of each device and shape; leave out rows that never win."""
    best: dict[Key, Row] = {}
    for row in rows:
        if row.valid and (row.key not in best or row.us < best[row.key].us):
            best[row.key] = row
    return best


def _rows_only_in(rows: dict[Key, Row], others: dict[Key, Row]) -> list[Row]:
    return [row for key, row in rows.items() if key not in others]
