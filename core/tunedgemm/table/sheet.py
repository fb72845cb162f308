"""Sheet: a CSV file as texts, read and rewritten without losing unknown content; torch-free.

A line that begins with ``#`` is a comment, above the header and below it. Any other physical line
is one record. No table has a line break inside a field, so an unclosed quote
costs one line only. An unchanged line is written back byte for byte.
"""

from __future__ import annotations

import collections
import contextlib
import csv
import errno
import io
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from tunedgemm.errors import TableError
from tunedgemm.process.filelocks import file_lock
from tunedgemm.process.files import read_regular, replace_file, target_of
from tunedgemm.table.foreign import refuse_foreign
from tunedgemm.table.published import checked_body
from tunedgemm.text.cell import is_one_line

#: Longest wait for another process that is writing the same file, in seconds.
LOCK_TIMEOUT = 60.0

#: Longest line of a table, in characters: a hundred times what the longest kernel names need.
LONGEST = 1 << 16

_CONFLICT = ("<<<<<<<", "=======", ">>>>>>>", "|||||||")


@attrs.define
class Record:
    """One line below the header.

    Attributes:
        line: its number in the file, the header being 1; 0 for a record that was not read.
        cells: stripped texts by column; columns that the line is too short for are absent.
        surplus: fields beyond the last column.
        raw: the line itself where it is a comment or not CSV; *cells* is empty then.
        text: the line as it was read, with its line end; "" for a record that was not read.
    """

    line: int = 0
    cells: dict[str, str] = attrs.field(factory=dict)
    surplus: tuple[str, ...] = ()
    raw: str = ""
    text: str = attrs.field(default="", eq=False, repr=False)

    @property
    def is_comment(self) -> bool:
        """Tell whether the line is a comment."""
        return is_comment(self.raw)


@attrs.define
class Sheet:
    """A CSV file: its columns in order and all its records, even empty ones.

    Attributes:
        columns: the columns to write. While those of the file lead in their order, unchanged lines
            keep their text, with empty fields for the columns that follow. In another order all
            lines are formatted again.
        records: the lines below the header.
        head: the file up to and including its header, as it was read, with the comments above it;
            "" for a sheet that was not.
        names: the column of each field of the header, "" for one that is dropped when lines are
            formatted again.
        cut: the number of a truncated last line, which is not among *records*, and a message about
            it; see `read_sheet`.
    """

    columns: list[str]
    records: list[Record]
    head: str = ""
    names: tuple[str, ...] = ()
    cut: tuple[int, str] | None = None

    def rename(self, names: dict[str, str]) -> None:
        """Rename columns; the header keeps its text."""
        self.names = tuple(names.get(name, name) for name in self.names)
        self.columns = [names.get(name, name) for name in self.columns]
        for record in self.records if names else ():
            record.cells = {names.get(column, column): text for column, text in record.cells.items()}

    def text(self) -> str:
        """Return the file's new content.

        Cells of columns that are not in `columns` are dropped; surplus fields stay after the last.

        Raises:
            TableError: a line would not be read as its record.
        """
        named = [name for name in self.names if name]
        if not self.head or self.columns[: len(named)] != named:
            return self._anew()
        added = self.columns[len(named) :]
        newline = _ending(self.head) or "\n"
        lines = [_extend_line(self.head, added, newline)]
        for record in self.records:
            if record.raw:
                lines.append(record.text or record.raw + newline)
            elif record.text and self._unchanged(record):
                lines.append(_pad_line(record.text, len(self.names), len(added)) if added else record.text)
            else:
                lines.append(format_line(record, (*self.names, *added)) + newline)
        whole = [line if _ending(line) else line + newline for line in lines[:-1]]
        return "".join((*whole, lines[-1]))

    def _anew(self) -> str:
        lines = [_join_fields(self.columns)]
        for record in self.records:
            if record.raw:
                lines.append(record.raw)
            elif record.cells or record.surplus:
                lines.append(format_line(record, self.columns))
        return "\n".join((*lines, ""))

    def _unchanged(self, record: Record) -> bool:
        """Tell whether the record's text still matches its cells."""
        again = record_of_line(record.line, record.text, self.names)
        return (again.cells, again.surplus) == (record.cells, record.surplus)


def present(path: Path) -> bool:
    """Tell whether this process can see the file; never raises, unlike `Path.exists` in a closed folder."""
    try:
        path.stat()
    except (OSError, ValueError):  # a zero byte
        return False
    return True


def read_sheet(path: Path, *, whole: bool = True) -> Sheet:
    """Read a CSV file as texts; columns without a name, or that pandas named ``Unnamed``, have no cells.

    Args:
        whole: whether a truncated last line is an error; else the sheet has the lines before it,
            and must not be written.

    Raises:
        TableError: the file is missing, unreadable, empty, not text, truncated in its last line, or
            repeats a column.
    """
    return parse_sheet(path, as_text(path, read_content(path)), whole=whole)


def parse_sheet(path: Path, text: str, *, whole: bool = True) -> Sheet:
    """Parse the content of a file; *path* is for messages alone, which are those of `read_sheet`."""
    lines = list(io.StringIO(text, newline=""))  # any of the three line ends; each line keeps its own
    header = next((number for number, line in enumerate(lines) if may_be_header(line)), None)
    if header is None:
        fault = "has comments alone" if any(map(is_comment, lines)) else "is empty"
        raise TableError(f"{path}: the file {fault}; write a header, or delete the file to start again")
    head = lines[header].removeprefix("\ufeff").rstrip("\r\n")
    if len(head) > LONGEST:
        raise TableError(f"{path}: line {header + 1} is too long for a header (got {len(head)} characters)")
    names = tuple(name if name and not name.startswith("Unnamed") else "" for name in map(str.strip, _fields(head) or head.split(",")))
    columns = [name for name in names if name]
    if twice := sorted(name for name, times in collections.Counter(columns).items() if times > 1):
        raise TableError(f"{path}: column {twice[0]!r} occurs twice in line {header + 1}, which should be the header")
    records = [record_of_line(number, line, names) for number, line in enumerate(lines[header + 1 :], header + 2)]
    cut = None
    if records and not _ending(lines[-1]):
        last = records[-1]
        if last.cells and len(last.cells) < len(columns):
            fault = f"the last, is cut off after {len(last.cells)} of {len(columns)} fields; restore the file, or delete that line"
            if whole:
                raise TableError(f"{path}: line {last.line}, {fault}")
            cut = records.pop().line, fault
    return Sheet(columns, records, "".join(lines[: header + 1]), names, cut)


@contextlib.contextmanager
def locked(path: Path, timeout: float = LOCK_TIMEOUT, poll: float = 0.01) -> Iterator[None]:
    """Hold the lock of the file that *path* leads to, across processes and threads; create its folder.

    Args:
        timeout: longest wait for another process, in seconds.
        poll: seconds between two attempts; a process that polls more often gets it sooner.

    Raises:
        TableError: the folder cannot be written, or another process holds the lock for longer.
    """
    try:
        lock = _lock_of(target_of(path))
        lock.acquire(timeout=timeout, poll_interval=poll)
    except TimeoutError:
        raise TableError(f"{path}: another process has held the lock {lock.lock_file} for {timeout:.0f} s; end it and try again") from None
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        yield
    finally:
        lock.release()


def _lock_of(target: Path) -> Any:
    """Return the lock of a file whose links are followed; create its folder."""
    path = target.with_name(f"{target.name}.lock")
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():  # filelock refuses it, too, but does not say why
        raise OSError(errno.ELOOP, f"its lock {path} is a symbolic link; remove the link")
    if not path.exists():  # filelock would try again until the timeout in a folder that can hold no file
        tempfile.TemporaryFile(dir=path.parent).close()
    return file_lock(path)


def replace_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace a file's content atomically; see `replace_file`.

    Raises:
        TableError: the folder cannot be written, the disk is full, or the text has half a
            character; the old content remains.
    """
    try:
        replace_file(path, text.encode(), durable=durable)
    except UnicodeEncodeError as error:
        raise TableError(f"{path}: not written: {error.object[error.start]!r} is half a character, which UTF-8 cannot hold") from None
    except OSError as error:
        raise _unwritable(path, error) from error


def extend(handle: int, data: bytes) -> None:
    """Append bytes to a file that was opened for appending, all of them or none. Call it under `locked`.

    Raises:
        OSError: the disk is full, or the like; the file is unchanged.
    """
    size = os.fstat(handle).st_size
    try:
        while data:  # once, unless the disk accepts a part; the second attempt then raises the reason
            data = data[os.write(handle, data) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(handle, size)
        raise


def _unwritable(path: Path, error: OSError) -> TableError:
    reason = error.strerror or str(error)
    return TableError(f"{path}: cannot be written: {reason}; name another output file, or set TUNEDGEMM_HOME to a writable folder")


def read_content(path: Path) -> bytes:
    """Return the bytes of a table, without the provenance of a published one, which is checked.

    Raises:
        TableError: the file is missing, cannot be read, or is a published table that was changed.
    """
    return checked_body(path, read_raw(path))


def read_raw(path: Path) -> bytes:
    """Return all bytes of a table or a list of shapes.

    Raises:
        TableError: the file is missing, cannot be read, or has another format (`foreign.FORMATS`).
    """
    try:
        content = read_regular(path)
    except FileNotFoundError:
        raise TableError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise TableError(f"{path}: this is a folder; name a CSV file in it") from None
    except OSError as error:
        raise TableError(f"{path}: cannot be read: {error.strerror or error}") from error
    refuse_foreign(path, content)
    return content


def as_text(path: Path, content: bytes) -> str:
    """Decode the bytes of a file, or of some of its lines; *path* is for messages alone.

    Raises:
        TableError: they are not UTF-8 text.
    """
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TableError(f"{path}: not a text file (byte {error.start} is not UTF-8); save the table as CSV in UTF-8") from None
    if "\0" in text:
        raise TableError(f"{path}: not a text file (it contains zero bytes); save the table as CSV in UTF-8")
    return text


def is_comment(line: str) -> bool:
    """Tell whether a line is a comment; a spreadsheet quotes one with a comma in it."""
    return line.lstrip(' \t\ufeff"').startswith("#")


def may_be_header(line: str) -> bool:
    """Tell whether a line is neither empty nor a comment: the first such line of a file is its header."""
    return bool(line.strip(" \t,\r\n\ufeff")) and not is_comment(line)


def _fields(line: str) -> list[str] | None:
    """Split one line into fields; None for a line that is not CSV."""
    if '"' not in line:
        return line.split(",")
    try:
        return next(csv.reader([line], strict=True, skipinitialspace=True))
    except csv.Error:
        return None


def record_of_line(number: int, text: str, names: Sequence[str]) -> Record:
    """Split a line into the cells of a record; *names* are those of `Sheet`."""
    line = text.rstrip("\r\n")
    if len(line) > LONGEST:
        return Record(number, raw=line, text=text)
    if not line.strip(" \t,"):
        return Record(number, text=text)
    fields = None if is_comment(line) else _fields(line)
    if fields is None or line.startswith(_CONFLICT):
        return Record(number, raw=line, text=text)
    has_blanks = len(line.split()) > 1 or line[0].isspace() or line[-1].isspace()
    cells = dict(zip(names, map(str.strip, fields) if has_blanks else fields, strict=False))
    cells.pop("", None)  # of columns without a name
    surplus = tuple(fields[len(names) :])
    return Record(number, cells, surplus if any(map(str.strip, surplus)) else (), text=text)


def format_line(record: Record, names: Sequence[str]) -> str:
    """Format a record as a line of these columns.

    Raises:
        TableError: it would not be read as this record; names the column and the text.
    """
    fields = {name: record.cells.get(name, "") for name in names if name}
    line = _join_fields([*(fields.get(name, "") for name in names), *record.surplus])
    read = record_of_line(record.line, line, names)
    for name, text in fields.items():
        if read.cells.get(name, "") != text or not is_one_line(text):
            raise TableError(f"{name!r} cannot be written: a table would not give back this text (got {text!r:.80})")
    if read.raw:
        raise TableError(f"a line cannot be written: a table would not give it back (got {line!r:.80})")
    return line


def _join_fields(fields: Sequence[str]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="").writerow(fields)
    return out.getvalue()


def _ending(line: str) -> str:
    """Return the end of a line: ``\\n``, ``\\r\\n``, ``\\r``, or "" where the file ends without one."""
    return line[len(line.rstrip("\r\n")) :]


def _extend_line(line: str, fields: Sequence[str], newline: str) -> str:
    ending = _ending(line)
    return f"{line[: len(line) - len(ending)]},{_join_fields(fields)}{ending or newline}" if fields else line


def _pad_line(line: str, width: int, added: int) -> str:
    """Pad a line of *width* columns for *added* more: empty fields for those, surplus ones after them."""
    ending = _ending(line)
    body = line[: len(line) - len(ending)]
    if not body.strip(" \t,"):
        return line
    fields = _fields(body) or []
    if len(fields) > width:
        return _join_fields([*fields[:width], *[""] * added, *fields[width:]]) + ending
    return body + "," * (width - len(fields) + added) + ending
