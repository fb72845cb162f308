"""``table diff``: the differences between the best rows of two tables."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

from tunedgemm.cli.document import print_document
from tunedgemm.cli.table.files import op_of, row_facts, shape_text, solution_text
from tunedgemm.shape import Shape
from tunedgemm.table.csvfile import read_rows
from tunedgemm.table.folders import named_file
from tunedgemm.table.row import Row

#: Digits of a time in microseconds that tables keep.
DIGITS = 4

Key = tuple[str, int, str, Shape]


@attrs.frozen
class Differences:
    """The differences between the best rows of two files.

    Attributes:
        files: the first file and the second.
        only: the rows whose shape and device only the first, or only the second, has.
        winners, classes, times: pairs of rows with different solutions; with different bit classes
            of one solution; or with different times of one.
        equal: the number of equal rows.
    """

    files: tuple[Path, Path]
    only: tuple[tuple[Row, ...], tuple[Row, ...]]
    winners: tuple[tuple[Row, Row], ...]
    classes: tuple[tuple[Row, Row], ...]
    times: tuple[tuple[Row, Row], ...]
    equal: int

    def __bool__(self) -> bool:
        return any((*self.only, self.winners, self.classes, self.times))


def run(arguments: argparse.Namespace) -> int:
    """Compare the best row of each device and shape; return 1 if any differs."""
    files = named_file(arguments.first), named_file(arguments.second)
    op = op_of(arguments, files)
    first, second = (_winning_rows(read_rows(file, op)[0]) for file in files)
    differences = _differences(files, first, second)
    if arguments.json:
        _print_json(op.name, differences)
    else:
        print("\n".join(_lines(differences)))
    return 1 if differences else 0


def _differences(files: tuple[Path, Path], first: dict[Key, Row], second: dict[Key, Row]) -> Differences:
    pairs = [(row, second[key]) for key, row in first.items() if key in second]
    winners = [(row, other) for row, other in pairs if row.solution != other.solution]
    same = [(row, other) for row, other in pairs if row.solution == other.solution]
    classes = [(row, other) for row, other in same if row.bit_class != other.bit_class]
    same = [pair for pair in same if pair not in classes]
    times = [(row, other) for row, other in same if round(row.us, DIGITS) != round(other.us, DIGITS)]
    only = _rows_only_in(first, second), _rows_only_in(second, first)
    return Differences(files, only, tuple(winners), tuple(classes), tuple(times), len(same) - len(times))


def _lines(found: Differences) -> Iterator[str]:
    for file, rows in zip(found.files, found.only, strict=True):
        yield from (f"only in {file}: {shape_text(row)}: {solution_text(row)}" for row in rows)
    for row, other in found.winners:
        yield f"another winner: {shape_text(row)}: {solution_text(row)} -> {solution_text(other)}"
    for row, other in found.classes:
        yield f"another class: {shape_text(row)}: {row.solution} {row.bit_class or 'none'} -> {other.bit_class or 'none'}"
    for row, other in found.times:
        change = 100 * (other.us / row.us - 1)
        yield f"another time: {shape_text(row)}: {solution_text(row)} -> {other.us:.2f} us ({change:+.1f} %)"
    alone = ", ".join(f"{len(rows)} only in {file}" for file, rows in zip(found.files, found.only, strict=True))
    classes = f"{len(found.classes)} other classes, " if found.classes else ""
    yield f"{found.equal} equal, {len(found.winners)} other winners, {classes}{len(found.times)} other times, {alone}"


def _print_json(op: str, found: Differences) -> None:
    facts = {
        "op": op,
        "files": found.files,
        "equal": found.equal,
        "only_first": [row_facts(row) for row in found.only[0]],
        "only_second": [row_facts(row) for row in found.only[1]],
        "winners": [{"first": row_facts(row), "second": row_facts(other)} for row, other in found.winners],
        "classes": [{"first": row_facts(row), "second": row_facts(other)} for row, other in found.classes],
        "times": [{"first": row_facts(row), "second": row_facts(other)} for row, other in found.times],
    }
    print_document("table.diff", 1, facts)


def _winning_rows(rows: Iterable[Row]) -> dict[Key, Row]:
    """Return the winning row of each device and shape; leave out rows that never win."""
    best: dict[Key, Row] = {}
    for row in rows:
        if row.valid and (row.key not in best or row.us < best[row.key].us):
            best[row.key] = row
    return best


def _rows_only_in(rows: dict[Key, Row], others: dict[Key, Row]) -> tuple[Row, ...]:
    return tuple(row for key, row in rows.items() if key not in others)
