"""Untuned: lists of shapes to tune, as captured, made from a model or written by hand."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from tunedgemm.errors import TableError, TunedGemmError
from tunedgemm.shape import Shape
from tunedgemm.table.columns import DEVICE, UNTUNED_EXTRA, is_tuned, other_ops_hint, sizes, synonyms
from tunedgemm.table.csvfile import Problem, read_tuned, refuse_other_separators, require_columns
from tunedgemm.table.row import UNUSED, blank, kept, key_of, own_cell, reason, shape_cells, shape_of, whole_number
from tunedgemm.table.sheet import Record, Sheet, locked, read_sheet, replace_text

if TYPE_CHECKING:
    from tunedgemm.ops.op import Op

#: most calls of a shape in a list: one per microsecond for 285 years; larger counts would be
#: rounded
MOST_CALLS = 1 << 53


@attrs.frozen
class Untuned:
    """A shape to tune, and how often it was called.

    Attributes:
        shape: the shape.
        count: eager calls.
        graph: calls recorded into graphs, each of which runs at every replay of its graph.
        layer: names of the layers with this shape; "" where unknown.
        cu_num, gfx: the device that the line names; 0 for any, "" for any with these compute units.
    """

    shape: Shape
    count: int = 1
    graph: int = 0
    layer: str = attrs.field(default="", validator=kept)
    cu_num: int = 0
    gfx: str = ""

    @property
    def calls(self) -> int:
        """Return the calls of both kinds; a recorded call counts as one replay."""
        return self.count + self.graph

    def joined(self, other: Untuned) -> Untuned:
        """Return this shape with the calls and layers of another listing added."""
        return attrs.evolve(
            self, count=self.count + other.count, graph=self.graph + other.graph, layer=layers_of_both(self.layer, other.layer)
        )


def layers_of_both(first: str, second: str) -> str:
    """Join the names of layers in two texts, each once."""
    return " ".join(dict.fromkeys((*first.split(), *second.split())))


def untuned_of(record: Record, op: Op, gfx: str = "") -> Untuned:
    """Parse one line of an untuned file; a line without a count stands for one call.

    Args:
        gfx: the architecture whose fp8 is meant; "" for the line's, else the present device's.

    Raises:
        UserError: the line is not a shape that can be tuned.
    """
    cells = record.cells
    count, graph, cu_num = whole_number(cells, "count", 1), whole_number(cells, "graph", 0), whole_number(cells, "cu_num", 0)
    named = own_cell(cells, "gfx").lower() if cu_num else ""  # as AITER, which reads gfx with cu_num alone
    untuned = Untuned(shape_of(record, op, gfx), count, graph, own_cell(cells, "layer"), cu_num, named)
    if untuned.shape.m < 1:
        raise TableError("'M' must be at least 1 (got 0): an empty batch has nothing to tune")
    for column, number in (("count", untuned.count), ("graph", untuned.graph)):
        if number < 0:
            raise TableError(f"{column!r} must not be negative (got {number})")
        if number > MOST_CALLS:
            raise TableError(f"{column!r} must be at most {MOST_CALLS} (got {number:.3g})")
    return untuned


def record_of_untuned(untuned: Untuned, op: Op) -> Record:
    """Format a shape to tune as texts: the op's key, its other columns that hold a value, and its counts."""
    cells = {column: text for column, text in shape_cells(untuned.shape, op, untuned.gfx).items() if text or column in op.columns.key}
    cells |= {"count": str(untuned.count), "graph": str(untuned.graph) if untuned.graph else "", "layer": untuned.layer}
    cells |= {"gfx": untuned.gfx, "cu_num": str(untuned.cu_num)} if untuned.cu_num else {}
    return Record(cells={column: text for column, text in cells.items() if text or column in op.columns.key})


def read_untuned(path: Path, op: Op) -> list[Untuned]:
    """Read a list of shapes to tune, in order; lines of one shape are merged and their counts added.

    Raises:
        TableError: the file cannot be read, has an unknown column, or a line that is not a shape.
    """
    shapes, problems = _untuned_of_sheet(path, op, read_sheet(path), "")
    if problems:
        raise TableError(str(problems[0]))
    return shapes


def read_listed(path: Path, op: Op, gfx: str = "") -> tuple[list[Untuned], list[Problem]]:
    """Read a list of shapes as `read_untuned` does, but return broken lines and unknown columns.

    The last line may be cut off.

    Args:
        gfx: as in `untuned_of`.

    Raises:
        TableError: the file cannot be read, or is another op's.
    """
    sheet = read_sheet(path, whole=False)
    shapes, problems = _untuned_of_sheet(path, op, sheet, gfx)
    return shapes, problems + ([Problem(path, *sheet.cut)] if sheet.cut else [])


def read_shapes(path: Path, op: Op, gfx: str = "") -> tuple[list[Untuned], list[Problem]]:
    """Read the shapes of a list as `read_listed` does, or those of a tuned table's rows.

    A table's rows for any M, and AITER's tagged rows, are no shapes of a workload and left out.

    Args:
        gfx: as in `untuned_of`.

    Raises:
        TableError: the file cannot be read, or is another op's.
    """
    if not is_tuned(read_sheet(path, whole=False).columns):
        return read_listed(path, op, gfx)
    sought = (record for record in read_tuned(path, op).records if record.cells.get(UNUSED[0]) != UNUSED[1])
    return _merged(path, op, [record for record in sought if (key := key_of(record, op)) is None or key[-1].m], gfx)


def _untuned_of_sheet(path: Path, op: Op, sheet: Sheet, gfx: str) -> tuple[list[Untuned], list[Problem]]:
    """Return the shapes of a sheet, merged, its unknown columns, and the lines that are not shapes."""
    refuse_other_separators(path, sheet.columns)
    columns = sheet.columns
    sheet.rename(synonyms(op, columns))
    allowed = tuple(dict.fromkeys((*op.columns.key, *op.columns.own, *UNTUNED_EXTRA, *DEVICE)))
    unknown = [column for column in sheet.columns if column not in allowed]
    if is_tuned(unknown):
        raise TableError(f"{path}: a tuned table, not a list of shapes; name the untuned file, with the columns {', '.join(allowed)}")
    require_columns(path, op, columns, [column for column in sizes(op) if column not in sheet.columns])
    shapes, problems = _merged(path, op, sheet.records, gfx)
    if unknown:
        names, may = ", ".join(map(repr, unknown))[:200], ", ".join(allowed)
        fault = f"unknown column {names}, not read; an untuned file of {op.name} may have {may}{other_ops_hint(op, columns)}"
        problems.insert(0, Problem(path, len(sheet.head.splitlines()), fault))
    return shapes, problems


def _merged(path: Path, op: Op, records: Iterable[Record], gfx: str) -> tuple[list[Untuned], list[Problem]]:
    """Return the shapes of lines, one for each shape and device, and the lines that are not shapes."""
    folded: dict[tuple[Shape, int, str], Untuned] = {}
    problems: list[Problem] = []
    for record in records:
        if blank(record):
            continue
        try:
            line = untuned_of(record, op, gfx)
        except (TunedGemmError, ValueError) as error:
            problems.append(Problem(path, record.line, reason(error)))
            continue
        key = (line.shape, line.cu_num, line.gfx)
        earlier = folded.get(key)
        calls = (line.count, line.graph) if earlier is None else (earlier.count + line.count, earlier.graph + line.graph)
        folded[key] = attrs.evolve(earlier or line, count=calls[0], graph=calls[1])
    return list(folded.values()), problems


def untuned_text(op: Op, rows: Iterable[Untuned]) -> str:
    """Format a list of shapes to tune as a CSV, in their order; an empty column is left out."""
    records = [record_of_untuned(row, op) for row in rows]
    filled = {column for record in records for column in record.cells}
    return Sheet([*op.columns.key, *(column for column in (*op.columns.own, *UNTUNED_EXTRA, *DEVICE) if column in filled)], records).text()


def write_untuned(path: Path, op: Op, rows: Iterable[Untuned]) -> None:
    """Write a list of shapes to tune, replacing the file; see `untuned_text`.

    Raises:
        TableError: the folder cannot be written.
    """
    text = untuned_text(op, rows)
    with locked(path):
        replace_text(path, text)
