"""Detect that stdout cannot be written, by an error type distinct from that of other files."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


class OutputError(OSError):
    """Standard output cannot be written."""


class Output:
    """Standard output, with a separate type of error from a command's files."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._error: OutputError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, or raise OutputError."""
        with self._recording():
            return self._stream.write(text)

    def flush(self) -> None:
        """Flush, or raise OutputError."""
        with self._recording():
            self._stream.flush()

    def settle(self) -> None:
        """Flush; raise this or an earlier OutputError, because argparse drops errors of its writes."""
        self.flush()
        if self._error:
            raise self._error

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._error = OutputError(error.errno, error.strerror or str(error))
            raise self._error from error


def give_up_output(error: OSError) -> None:
    """Discard all further output; name the reason on standard error, except for a closed pipe."""
    if error.errno != errno.EPIPE:
        print(f"tunedgemm: standard output: cannot be written: {error.strerror or error}", file=sys.stderr)
    with contextlib.suppress(OSError, ValueError):  # Python's buffer would fail again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
