"""Printable: text from files and plugins becomes text for people.

A name in a file may hold characters that move a terminal's cursor, hide text or reverse its order.
Errors, logs, consoles and the commands' streams show them as escapes: ``\\x1b``, ``\\u202e``.
Imports nothing from the package.
"""

from __future__ import annotations

import functools
import logging
import unicodedata
from collections.abc import Iterable
from typing import Any, TextIO

#: Categories of characters that a terminal obeys, hides or cannot encode: controls, formats (bidi,
#: zero width), halves of characters, separators of lines and paragraphs.
_UNSEEN = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))


def printable(text: str) -> str:
    """Return a text with its unseen characters as escapes; newlines and tabs stay."""
    if text.isprintable() or text.replace("\n", "").replace("\t", "").isprintable():  # the quick way for nearly all
        return text
    return "".join(character if character in "\n\t" or is_seen(character) else _escape(character) for character in text)


def printable_line(text: str) -> str:
    """Return a text as `printable` does, on one line: a newline in a name must not forge another line."""
    return printable(text).replace("\n", "\\n")


def is_seen(character: str) -> bool:
    """Tell whether a terminal shows a character, rather than obeying or hiding it."""
    return unicodedata.category(character) not in _UNSEEN


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


class PrintableStream:
    """A stream that escapes what is written to it.

    Attributes:
        unfiltered: the stream itself, for a writer whose text is printable already.
    """

    def __init__(self, stream: TextIO) -> None:
        self.unfiltered = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unfiltered, name)

    def write(self, text: str) -> int:
        """Write a text with its unseen characters as escapes."""
        self.unfiltered.write(printable(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)


class _PrintableRecords(logging.Filter):
    """Escapes a record's message and its traceback; other records keep their arguments."""

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
    """Return a logger whose records are printable; the package's is so once this module is imported."""
    found = logging.getLogger(name)
    found.addFilter(_RECORDS)
    return found


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning the first time that this process has it."""
    logger().warning("%s", text)


logger()
