"""Sheet: a CSV file as texts, read and rewritten without losing what is not understood; torch-free.

One physical line is one record: no table has a line break inside a field, and so an unclosed quote costs one line only.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
from collections.abc import Iterator
from pathlib import Path

import attrs
import filelock

from tunedgemm.errors import TableError

#: Longest wait for another process that is writing the same file, in seconds.
LOCK_TIMEOUT = 60.0

_CONFLICT = ("<<<<<<<", "=======", ">>>>>>>")


@attrs.define
class Record:
    """One line below the header.

    Attributes:
        line: its number in the file, the header being 1; 0 for a record that was not read.
        cells: stripped texts by column; columns that the line is too short for are absent.
        surplus: fields beyond the last column.
        raw: the line itself where it is no CSV; *cells* is empty then.
    """

    line: int = 0
    cells: dict[str, str] = attrs.field(factory=dict)
    surplus: tuple[str, ...] = ()
    raw: str = ""


@attrs.define
class Sheet:
    """A CSV file: its columns in order and its records, blank lines left out."""

    columns: list[str]
    records: list[Record]

    def text(self) -> str:
        """The file's new content. Cells of columns that are not in `columns` are left out, surplus fields stay behind the last."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.columns)
        for record in self.records:
            if record.raw:
                out.write(record.raw + "\n")
            else:
                writer.writerow([*(record.cells.get(column, "") for column in self.columns), *record.surplus])
        return out.getvalue()


def present(path: Path) -> bool:
    """Whether there is such a file that this process can see; never raises, unlike `Path.exists` in a closed folder."""
    try:
        path.stat()
    except OSError:
        return False
    return True


def read_sheet(path: Path) -> Sheet:
    """Read a CSV file as texts; columns without a name, or that pandas named ``Unnamed``, are dropped.

    Raises:
        TableError: the file is missing, unreadable, empty, no text, cut off in its last line, or has a column twice.
    """
    text = _read_text(path)
    lines = text.split("\n")
    header = next((number for number, line in enumerate(lines) if line.strip(" \t,")), None)
    if header is None:
        raise TableError(f"{path}: the file is empty; a table starts with a line of column names (delete the file to start anew)")
    names = [name.strip() for name in _fields(lines[header]) or lines[header].split(",")]
    columns = [name for name in names if _named(name)]
    if twice := sorted({name for name in columns if columns.count(name) > 1}):
        raise TableError(f"{path}: column {twice[0]!r} stands twice in line {header + 1}: is it a line of column names?")
    records = []
    for number, line in enumerate(lines[header + 1 :], header + 2):
        if not line.strip(" \t,"):
            continue
        record = _record(number, line, names)
        if number == len(lines) and len(record.cells) < len(columns):  # the last line, and it does not end in a newline
            raise TableError(
                f"{path}: line {number}, the last, is cut off after {len(record.cells)} of {len(columns)} fields; "
                "restore the file, or delete that line"
            )
        records.append(record)
    return Sheet(columns, records)


@contextlib.contextmanager
def locked(path: Path, timeout: float = LOCK_TIMEOUT) -> Iterator[None]:
    """Hold the lock beside *path*, across processes and threads; the folder is created.

    Args:
        timeout: how long to wait for another process, in seconds.

    Raises:
        TableError: the folder cannot be written, or another process keeps the lock for longer.
    """
    lock = filelock.FileLock(path.with_name(f"{path.name}.lock"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=timeout, poll_interval=0.01)
    except filelock.Timeout:
        raise TableError(f"{path}: another process has kept {lock.lock_file} locked for {timeout:.0f} s; end it and try again") from None
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        yield
    finally:
        lock.release()


def replace_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace a file's content at once: a reader, or a process killed meanwhile, sees the old or the new, never a part.

    To be called under `locked`, which makes the one temporary name safe. A link is followed, the file's mode is kept.

    Args:
        durable: wait until the disk has it, so that it also survives a power cut.

    Raises:
        TableError: the folder cannot be written or the disk is full; the old content stands.
    """
    target = path.resolve()
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)  # the umask applies
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError, PermissionError):
            temporary.chmod(target.stat().st_mode & 0o7777)
        temporary.replace(target)
        if durable:
            _sync_folder(target.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise _unwritable(path, error) from error


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some file systems cannot sync a folder; the content itself is safe
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _unwritable(path: Path, error: OSError) -> TableError:
    reason = error.strerror or str(error)
    return TableError(
        f"{path}: cannot be written: {reason}; name another output file, or set TUNEDGEMM_HOME to a folder that can be written"
    )


def _read_text(path: Path) -> str:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise TableError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise TableError(f"{path}: is a folder; name a CSV file in it") from None
    except OSError as error:
        raise TableError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TableError(f"{path}: is no text (byte {error.start} is not UTF-8); a table is a CSV file in UTF-8") from None
    if "\0" in text:
        raise TableError(f"{path}: is no text (it contains zero bytes); a table is a CSV file in UTF-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _named(column: str) -> bool:
    return bool(column) and not column.startswith("Unnamed")


def _fields(line: str) -> list[str] | None:
    """The fields of one line; None for a line that is no CSV."""
    if '"' not in line:
        return line.split(",")
    try:
        return next(csv.reader([line], strict=True, skipinitialspace=True))
    except csv.Error:
        return None


def _record(number: int, line: str, names: list[str]) -> Record:
    fields = _fields(line)
    if fields is None or line.startswith(_CONFLICT):
        return Record(number, raw=line)
    cells = {name: field.strip() for name, field in zip(names, fields, strict=False) if _named(name)}
    surplus = tuple(fields[len(names) :])
    return Record(number, cells, surplus if any(field.strip() for field in surplus) else ())
