"""Console: standard output through rich, without markup and with printable text only.

Names are never broken over lines, so that they can be searched and copied. Output without a
terminal is as wide as its tables. A table too wide for a terminal drops optional columns, wraps
prose at spaces, or is printed as records.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

import attrs
import rich.console
from rich.cells import cell_len
from rich.segment import Segment

from tunedgemm.text.printable import printable, printable_line

if TYPE_CHECKING:
    from rich.table import Table

#: Width in columns of output without a terminal; tables may be wider.
FILE_WIDTH = 160
#: Valid values of COLUMNS.
_NUMBER = re.compile(r"[1-9]\d{0,5}")
#: Least width of a column with wrapped prose.
_LEAST_PROSE = 20


class Console(rich.console.Console):
    """A rich console that escapes its text, but not its own control codes.

    Attributes:
        grows: whether a table may be wider than the console.
    """

    def __init__(self, *, grows: bool = False, **options: Any) -> None:
        if os.environ.get("NO_COLOR"):  # rich itself would keep bold and italics
            options |= {"color_system": None}
        super().__init__(markup=False, emoji=False, highlight=False, **options)
        self.grows = grows

    @property
    def file(self) -> IO[str]:
        """Return the stream inside a `PrintableStream`, which would escape control codes."""
        file = super().file
        below: IO[str] = getattr(file, "unfiltered", file)
        return below

    @file.setter
    def file(self, file: IO[str]) -> None:
        """Set the stream."""
        rich.console.Console.file.fset(self, file)  # type: ignore[attr-defined]

    def on_broken_pipe(self) -> None:
        """Re-raise the error of a closed pipe, where rich would redirect stdout and exit."""
        raise  # noqa: PLE0704 - rich calls this where it handles the error

    def render(self, renderable: Any, options: rich.console.ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield the segments of a renderable with printable text."""
        for segment in super().render(renderable, options):
            shown = segment.text if segment.control else printable(segment.text)
            yield segment if shown is segment.text else segment._replace(text=shown)


def console() -> Console:
    """Return the console of standard output, with the width of COLUMNS or the terminal."""
    columns = os.environ.get("COLUMNS", "")
    if _NUMBER.fullmatch(columns):
        return Console(width=int(columns))
    if not sys.stdout.isatty():
        return Console(width=FILE_WIDTH, grows=True)
    return Console(width=shutil.get_terminal_size().columns if columns else None)  # rich would take COLUMNS=0 as a width


@attrs.frozen
class Column:
    """One column of a `Grid`.

    Attributes:
        heading: its heading, which is the key of its cells.
        right: whether cells are right-aligned.
        prose: whether cells are sentences, which may wrap at spaces.
        optional: whether a narrow table drops it.
    """

    heading: str
    right: bool = False
    prose: bool = False
    optional: bool = False


@attrs.frozen
class Grid:
    """A table whose names are never wrapped.

    Attributes:
        columns: its columns.
        rows: the cells of each row, by heading; a missing cell is empty.
        title: the line above it, or "".
        framed: whether lines surround the cells.
    """

    columns: tuple[Column, ...]
    rows: tuple[Mapping[str, str], ...]
    title: str = ""
    framed: bool = True

    @property
    def around(self) -> int:
        """Return the text columns of the lines and spaces between cells."""
        return 3 * len(self.columns) + 1 if self.framed else 2 * len(self.columns) - 1

    def forms(self) -> Iterator[Grid]:
        """Yield the table, then without its optional columns, then without lines."""
        yield self
        narrow = attrs.evolve(self, columns=tuple(column for column in self.columns if not column.optional))
        yield from (narrow, attrs.evolve(narrow, framed=False))

    def widths(self, room: float) -> list[int]:
        """Distribute *room* over the columns; return [] if a word does not fit."""
        texts = [[column.heading, *(_text(row, column) for row in self.rows)] for column in self.columns]
        widths = [max(map(cell_len, column)) for column in texts]
        spare = room - sum(widths) - self.around
        prose = [index for index, column in enumerate(self.columns) if column.prose]
        if spare >= 0 or not prose:
            return widths if spare >= 0 else []
        words = {index: max(cell_len(word) for text in texts[index] for word in (text.split() or [""])) for index in prose}
        least = {index: min(widths[index], max(words[index], _LEAST_PROSE)) for index in prose}
        spare += sum(widths[index] - least[index] for index in prose)
        for place, index in enumerate(prose if spare >= 0 else ()):
            share = int(spare) // (len(prose) - place)  # a column that needs less leaves it to the next
            more = min(share, widths[index] - least[index])
            widths[index] = least[index] + more
            spare -= more
        return widths if spare >= 0 else []

    def records(self) -> Iterator[str]:
        """Yield a line for each cell that is not empty, with its heading; a blank line ends a row."""
        longest = max(len(column.heading) for column in self.columns)
        for row in self.rows:
            cells = {column.heading: _text(row, column) for column in self.columns}
            yield from (f"{heading:{longest}}  {text}" for heading, text in cells.items() if text)
            yield ""


def print_grid(grid: Grid, output: Console) -> None:
    """Print a table in the fullest form that wraps no name; as records if none fits."""
    room = float("inf") if output.grows and not output.is_dumb_terminal else output.width
    if grid.title:
        output.print(printable_line(grid.title), soft_wrap=True, style="italic")
    for form in grid.forms():
        if widths := form.widths(room):
            _print_table(_table(form, widths), output, sum(widths) + form.around)
            return
    for line in grid.records():
        output.print(line, soft_wrap=True)


def _print_table(table: Table, output: Console, width: int) -> None:
    """Print a table, which may be wider than the console."""
    before = output.width
    output.width = max(before, width)
    try:
        output.print(table)
    finally:
        output.width = before


def _table(grid: Grid, widths: Sequence[int]) -> Table:
    """Return rich's table with these widths."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table() if grid.framed else Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for column, width in zip(grid.columns, widths, strict=True):
        table.add_column(column.heading, justify="right" if column.right else "left", width=width, overflow="fold")
    for row in grid.rows:
        table.add_row(*(Text(_text(row, column)) for column in grid.columns))
    return table


def _text(row: Mapping[str, str], column: Column) -> str:
    """Return a cell as one printable line, whose width is that of its escapes."""
    text = row.get(column.heading, "")
    return printable_line(" ".join(text.split()) if column.prose else text)


def grid_of(columns: Sequence[Column | str], rows: Iterable[Mapping[str, str]], title: str = "") -> Grid:
    """Make a table; a text stands for a column with that heading."""
    return Grid(tuple(Column(column) if isinstance(column, str) else column for column in columns), tuple(rows), title)
