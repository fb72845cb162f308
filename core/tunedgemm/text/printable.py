"""Printable: escape control characters in text from files and plugins.

They could move a terminal's cursor, or hide or reverse text. Errors, logs and all output show them
as escapes: ``\\x1b``, ``\\u202e``.
Imports nothing from the package.
"""

from __future__ import annotations

import functools
import logging
import unicodedata
from collections.abc import Iterable
from typing import Any, TextIO

#: Unicode categories that are escaped: controls, formats (bidi, zero width), surrogates, line and
#: paragraph separators.
_UNSEEN = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))


def printable(text: str) -> str:
    """Escape unprintable characters in a text, except newlines and tabs."""
    if text.isprintable() or text.replace("\n", "").replace("\t", "").isprintable():  # the quick way for nearly all
        return text
    return "".join(character if character in "\n\t" or is_seen(character) else _escape(character) for character in text)


def printable_line(text: str) -> str:
    """Escape a text like `printable`, and newlines, too, which could forge another line."""
    return printable(text).replace("\n", "\\n")


def is_seen(character: str) -> bool:
    """Check whether a terminal shows a character instead of interpreting or hiding it."""
    return unicodedata.category(character) not in _UNSEEN


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


class PrintableStream:
    """A stream that escapes what is written to it.

    Attributes:
        unfiltered: the wrapped stream, for writers of printable text.
    """

    def __init__(self, stream: TextIO) -> None:
        self.unfiltered = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unfiltered, name)

    def write(self, text: str) -> int:
        """Write a text with unprintable characters escaped."""
        self.unfiltered.write(printable(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)


class _PrintableRecords(logging.Filter):
    """Escapes the messages and tracebacks of log records."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            message = record.getMessage()
        except Exception:  # the handler reports arguments that do not fit
            return True
        if (shown := printable(message)) != message:
            record.msg, record.args = shown, ()
        if record.exc_info and record.exc_text is None:
            record.exc_text = printable(logging.Formatter().formatException(record.exc_info))
        return True


_RECORDS = _PrintableRecords()


def logger(name: str = "tunedgemm") -> logging.Logger:
    """Return a logger whose records are escaped."""
    found = logging.getLogger(name)
    found.addFilter(_RECORDS)
    return found


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning once per process."""
    logger().warning("%s", text)


logger()
