"""Console: standard output as rich prints it; text is never markup, and always printable."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import IO, Any

import rich.console
from rich.segment import Segment

from tunedgemm.printable import printable

#: Columns of text in a file or a pipe, which have no width.
FILE_WIDTH = 160


class Console(rich.console.Console):
    """A rich console that escapes the text it shows, but not its own control codes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    @property
    def file(self) -> IO[str]:
        """Return the stream below a `PrintableStream`, which would escape the control codes."""
        file = super().file
        below: IO[str] = getattr(file, "unfiltered", file)
        return below

    @file.setter
    def file(self, file: IO[str]) -> None:
        """Set the stream."""
        rich.console.Console.file.fset(self, file)  # type: ignore[attr-defined]

    def render(self, renderable: Any, options: rich.console.ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield the segments of a renderable, and of those inside it, with printable text."""
        for segment in super().render(renderable, options):
            shown = segment.text if segment.control else printable(segment.text)
            yield segment if shown is segment.text else segment._replace(text=shown)


def console() -> Console:
    """Return standard output; wide unless it is a terminal, so that lines of a log stay whole."""
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else FILE_WIDTH
    return Console(width=wide)
