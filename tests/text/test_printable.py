"""Printable: people see escapes in place of characters that a terminal obeys or hides."""

from __future__ import annotations

import io
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tunedgemm.errors import TableError, UnknownOpError
from tunedgemm.text.printable import PrintableStream, logger, printable

ROOT = Path(__file__).parents[2]

#: A text as in a file, and as people see it.
SEEN = {
    "\x1b[2J\x07": r"\x1b[2J\x07",
    "a\rb\x00\x08\x7f": r"a\rb\x00\x08\x7f",
    "\x9b31m\x85": r"\x9b31m\x85",
    "\u202egpj.exe\u2066\u061c": r"\u202egpj.exe\u2066\u061c",
    "a\u2028b\u2029": r"a\u2028b\u2029",
    "a\u200bb\u2060\ufeff\u00ad": r"a\u200bb\u2060\ufeff\xad",
    "\ud800": r"\ud800",
    "\U000e0041": r"\U000e0041",
}


@pytest.mark.parametrize("text", SEEN)
def test_unseen_characters_are_escapes(text):
    """Controls, bidi marks, separators, zero widths and half characters become escapes."""
    assert printable(text) == SEEN[text]
    assert printable(printable(text)) == SEEN[text]


@pytest.mark.parametrize("text", ["", "plain", "M\t1\n2", "µs\u00a0\u3000", "日本語 עברית हिन्दी", "e\u0301", "🙂", "\\x1b"])
def test_other_text_is_unchanged(text):
    """Text of any language, newlines and tabs stay."""
    assert printable(text) == text


def test_errors_are_printable():
    """An error shows escapes, whichever bases it has, and keeps its arguments."""
    for kind in (TableError, UnknownOpError):
        error = kind("a\x1bb")
        assert str(error) == r"a\x1bb"
        assert error.args == ("a\x1bb",)


def test_records_are_printable(caplog):
    """A log's message, arguments and traceback show escapes; a harmless record keeps its arguments."""
    with caplog.at_level(logging.INFO, logger="tunedgemm"):
        logging.getLogger("tunedgemm").warning("%s: %r", "a\x1b[0m", "\x07")
        logging.getLogger("tunedgemm").warning("%s: %d", "a", 1)
        try:
            int("x")
        except ValueError as error:
            error.args = ("\x1b]0;title\x07",)
            logger("vllm.tunedgemm").exception("raised")
    first, second, third = caplog.records
    assert first.getMessage() == r"a\x1b[0m: '\x07'"
    assert second.args == ("a", 1)
    assert r"ValueError: \x1b]0;title\x07" in third.exc_text
    assert "\x1b" not in logging.Formatter().format(third)


def test_every_module_logs_printably():
    """The package's logger escapes even where only a low module was imported."""
    source = "import logging, tunedgemm.table.sheet; logging.getLogger('tunedgemm').warning('%s', 'a\\x1bb')"
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ":".join(sys.path)}
    )
    assert done.stderr == "a\\x1bb\n"


def test_a_stream_is_printable():
    """All that is written to a stream shows escapes; its other attributes are the stream's."""
    below = io.StringIO()
    stream = PrintableStream(below)
    print("a\x1b", "b\u202e", file=stream)
    stream.writelines(["\x07", "\n"])
    assert below.getvalue() == "a\\x1b b\\u202e\n\\x07\n"
    assert stream.getvalue == below.getvalue


def test_only_this_module_makes_other_loggers():
    """All records are printable: other modules have the package's logger, or one of `logger`."""
    made = re.compile(r"getLogger\((?!\"tunedgemm\"\)|\))")
    files = [file for folder in ("core/tunedgemm", "plugins") for file in (ROOT / folder).rglob("*.py") if "tests" not in file.parts]
    assert [file.name for file in files if made.search(file.read_text())] == ["printable.py"]
