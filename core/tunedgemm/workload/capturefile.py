"""The file of captured shapes: an untuned CSV shared with other processes. Torch-free.

New shapes are appended; counts are added by rewriting the file. Both happen under the file's lock.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import attrs

from tunedgemm.errors import TableError, TunedGemmError
from tunedgemm.process.files import open_regular
from tunedgemm.table.columns import UNTUNED_EXTRA
from tunedgemm.table.sheet import Record, Sheet, as_text, extend, locked, may_be_header, parse_sheet, replace_text
from tunedgemm.table.untuned import Untuned, record_of_untuned, untuned_of

if TYPE_CHECKING:
    from tunedgemm.ops.op import Op
    from tunedgemm.shape import Shape

#: Eager calls of a shape, and calls recorded into graphs.
Calls = tuple[int, int]

#: Mark of a truncated line, which readers then report.
CUT_OFF = "cut off"

#: Bytes at the start of a file and before the current offset, compared to detect edits in place.
_START, _LAST = 64, 256

#: Most digits of a count that is read without parsing its line.
_DIGITS = 15

#: Poll interval in seconds of the file lock; appending a line takes a fraction of a millisecond.
_POLL = 0.005

#: Seconds in which a process without the lock ends a line that it is writing.
_ENDED = 0.02


@attrs.frozen
class _Read:
    """How far a file was read: identity, offset, header, and bytes to detect edits in place."""

    inode: tuple[int, int]
    offset: int
    sheet: Sheet
    ends: tuple[bytes, bytes]


class CaptureFile:
    """A process's view of an untuned file; not thread-safe.

    Attributes:
        op: the op of the shapes.
        path: the untuned CSV: the op's key columns, ``count``, ``graph``, and any other columns.
    """

    def __init__(self, op: Op, path: Path) -> None:
        self.op = op
        self.path = path
        self._names: tuple[str, ...] = ()
        self._parsed: dict[str, Shape | None] = {}  # by the text of a line below this header
        self._replaced: BinaryIO | None = None  # the file that `add` replaced last, read to its end
        self.forget()

    def forget(self) -> None:
        """Read the file from its start next time."""
        self._read: _Read | None = None
        self._shapes: set[Shape] = set()

    def enter(self, rows: Mapping[Shape, Calls], patience: float) -> set[Shape] | None:
        """Append a line for each new shape, in one write.

        Args:
            rows: the shapes with their calls.
            patience: lock timeout in seconds.

        Returns:
            The appended shapes; None if the file must be rewritten, because it is missing, lacks a
            column or ends in the middle of a line.

        Raises:
            TableError: the file cannot be read or written; it is unchanged.
        """
        with locked(self.path, patience, _POLL):
            try:
                with open_regular(self.path, "rb+", flags=os.O_APPEND) as file:
                    return self._enter(file, rows)
            except FileNotFoundError:
                return None
            except OSError as error:
                raise TableError(f"{self.path}: cannot be written: {error.strerror or error}") from error

    def _enter(self, file: BinaryIO, rows: Mapping[Shape, Calls]) -> set[Shape] | None:
        read = self._catch_up(file)
        if read is None:
            return None
        fresh = {shape: self._line(shape, calls) for shape, calls in rows.items() if shape not in self._shapes}
        if not all(column in read.sheet.columns for record in fresh.values() for column in record.cells):
            return None
        if fresh:
            head = read.sheet.head
            text = attrs.evolve(read.sheet, records=list(fresh.values())).text()[len(head) :]
            extend(file.fileno(), text.encode())
            self._shapes.update(fresh)
            self._read = self._read_up_to(file, read.offset + len(text.encode()), read.sheet)
        return set(fresh)

    def add(self, rows: Mapping[Shape, Calls], patience: float) -> None:
        """Add calls to the lines of shapes, and append new shapes; keep all other lines.

        Args:
            rows, patience: as in `enter`.

        Raises:
            TableError: the file cannot be read or written; it is unchanged.
        """
        with locked(self.path, patience):
            self._move_late_lines(last=True)
            with contextlib.ExitStack() as on_failure:
                try:
                    before = on_failure.enter_context(open_regular(self.path))
                    content = before.read()
                    if content and not content.endswith((b"\n", b"\r")):
                        time.sleep(_ENDED)
                        content += before.read()
                except FileNotFoundError:
                    before, content = None, b""
                except OSError as error:
                    raise TableError(f"{self.path}: cannot be read: {error.strerror or error}") from error
                text, shapes = self._merge_calls(self._end_last_line(as_text(self.path, content)), rows)
                replace_text(self.path, text, durable=False)  # not durable: a power cut ends the workload, too
                on_failure.pop_all()
            self._replaced = before
            self._move_late_lines()
            self.forget()
            with contextlib.suppress(OSError), open_regular(self.path) as file:
                self._read = self._read_up_to(file, len(text.encode()), parse_sheet(self.path, _head(text)))
                self._shapes = shapes

    @property
    def may_have_late_lines(self) -> bool:
        """Check whether others may still write to a file that `add` has replaced."""
        return self._replaced is not None

    def move_late_lines(self, patience: float) -> None:
        """Append lines that others, without the lock, appended to the replaced file.

        Raises:
            TableError: the file cannot be written.
        """
        with locked(self.path, patience):
            self._move_late_lines(last=True)

    def _move_late_lines(self, *, last: bool = False) -> None:
        """Move whole lines; the last time also one without an end. Call it under the lock."""
        if self._replaced is None:
            return
        late = self._replaced.read()
        whole = len(late) if last else late.rfind(b"\n") + 1
        self._replaced.seek(whole - len(late), os.SEEK_CUR)
        if late[:whole]:
            text = late[:whole] if late[:whole].endswith(b"\n") else late[:whole] + b"\n"
            try:
                with open_regular(self.path, "rb+", flags=os.O_APPEND) as file:
                    extend(file.fileno(), text)
            except OSError as error:
                raise TableError(f"{self.path}: cannot be written: {error.strerror or error}") from error
        if last:
            self._replaced.close()
            self._replaced = None

    def _merge_calls(self, text: str, rows: Mapping[Shape, Calls]) -> tuple[str, set[Shape]]:
        """Return the file's content with the calls added, and the shapes of all its lines then."""
        head = _head(text)
        sheet = parse_sheet(self.path, head) if head else Sheet([], [])
        lines = _lines(text[len(head) :])
        shapes = self._shapes_of(lines, sheet) if head else []
        fresh = {shape: self._line(shape, calls) for shape, calls in rows.items()}
        needed = dict.fromkeys((*self.op.columns.key, "count", "graph", *(column for record in fresh.values() for column in record.cells)))
        wider = not set(needed) <= set(sheet.columns)
        # An unchanged line is its text alone.
        touched = [wider or shape in rows for shape in shapes]
        texts = [line for line, is_touched in zip(lines, touched, strict=True) if is_touched]
        parsed = iter(parse_sheet(self.path, head + "".join(texts)).records if texts else ())
        for line, shape, is_touched in zip(lines, shapes, touched, strict=True):
            record = next(parsed) if is_touched else Record(raw=line.rstrip("\r\n"), text=line)
            sheet.records.append(record)
            if shape is not None and shape in fresh and self._add_to_counts(record, rows[shape]):
                del fresh[shape]  # its other lines stay
        sheet.records += fresh.values()
        # An existing file's columns lead in their order, so that its lines keep their text.
        sheet.columns = list(dict.fromkeys((*sheet.columns, *needed)))
        return sheet.text(), {*rows, *(shape for shape in shapes if shape is not None)}

    def _add_to_counts(self, record: Record, calls: Calls) -> bool:
        """Add calls to the counts of a line; return False where those are not numbers."""
        try:
            before = untuned_of(record, self.op)
        except (TunedGemmError, ValueError):
            return False
        record.cells["count"] = str(before.count + calls[0])
        if calls[1] or "graph" in record.cells:
            record.cells["graph"] = str(before.graph + calls[1])
        return True

    def _end_last_line(self, text: str) -> str:
        """Return the content with its last line ended; mark a truncated one."""
        if not _has_content(text):
            return ""
        if text.endswith(("\n", "\r")):
            return text
        head = _head(text)
        newline = head[len(head.rstrip("\r\n")) :] or "\n"
        if len(head) == len(text):
            return text + newline
        last = _lines(text)[-1]
        sheet = parse_sheet(self.path, head + last + newline)
        [record] = sheet.records
        if record.cells and len(record.cells) < len(sheet.columns):
            record.surplus = (CUT_OFF,)
        return text[: len(text) - len(last)] + sheet.text()[len(head) :]

    def _catch_up(self, file: BinaryIO) -> _Read | None:
        """Read appended lines; return None if the header or the last line end is missing."""
        status, read = os.fstat(file.fileno()), self._read
        if read is not None and (
            read.inode != (status.st_dev, status.st_ino) or status.st_size < read.offset or read.ends != _ends_of_content(file, read.offset)
        ):
            read = self._read = None
            self._shapes = set()
        file.seek(read.offset if read else 0)
        content = file.read()
        if read is not None and not content:
            return read
        text = as_text(self.path, content)
        if not text.endswith(("\n", "\r")) or not (read or _has_content(text)):
            return None
        head = "" if read else _head(text)
        sheet = read.sheet if read else parse_sheet(self.path, head)
        self._shapes.update(shape for shape in self._shapes_of(_lines(text[len(head) :]), sheet) if shape is not None)
        self._read = self._read_up_to(file, (read.offset if read else 0) + len(content), sheet)
        return self._read

    def _read_up_to(self, file: BinaryIO, offset: int, sheet: Sheet) -> _Read:
        status = os.fstat(file.fileno())
        return _Read((status.st_dev, status.st_ino), offset, sheet, _ends_of_content(file, offset))

    def _line(self, shape: Shape, calls: Calls) -> Record:
        """Return the line of a new shape; those of our columns that would be empty are left out."""
        record = record_of_untuned(Untuned(shape, *calls), self.op)
        record.cells["graph"] = str(calls[1])
        return record

    def _shapes_of(self, lines: Sequence[str], sheet: Sheet) -> list[Shape | None]:
        """Return the shape of each line below the header; None for an invalid line.

        Cached by the text of a line without its counts, since the file is reread after each
        rewrite.
        """
        extra = sorted((index for index, name in enumerate(sheet.names) if name in UNTUNED_EXTRA), reverse=True)
        if self._names != sheet.names:
            self._names = sheet.names
            self._parsed.clear()
        keys = []
        for line in lines:
            fields = line.rstrip("\r\n").split(",")
            counts = (fields[index].strip() for index in extra if index < len(fields) and sheet.names[index] != "layer")
            if '"' not in line and all(not count or (count.isdecimal() and len(count) <= _DIGITS) for count in counts):
                for index in extra:
                    del fields[index : index + 1]
            keys.append(",".join(fields))
        new = {key: line for key, line in zip(keys, lines, strict=True) if key not in self._parsed}
        records = parse_sheet(self.path, sheet.head + "".join(new.values())).records if new else []
        self._parsed |= {key: self._shape_of(record) for key, record in zip(new, records, strict=True)}
        return [self._parsed[key] for key in keys]

    def _shape_of(self, record: Record) -> Shape | None:
        if record.raw or record.surplus:
            return None
        try:
            return untuned_of(record, self.op).shape
        except (TunedGemmError, ValueError):
            return None


def _has_content(text: str) -> bool:
    """Tell whether a file has any content, if only a header."""
    return bool(text.strip(" \t,\r\n\ufeff"))


def _head(text: str) -> str:
    """Return a file up to and including its header, or all of a file without one."""
    end = 0
    for line in io.StringIO(text, newline=""):
        end += len(line)
        if may_be_header(line):
            break
    return text[:end]


def _lines(text: str) -> list[str]:
    """Split a text into lines, each with its line end, which is any of the three."""
    return list(io.StringIO(text, newline=""))


def _ends_of_content(file: BinaryIO, offset: int) -> tuple[bytes, bytes]:
    """Return the first bytes of a file, and the last ones before *offset*."""
    start = max(0, offset - _LAST)
    return os.pread(file.fileno(), min(_START, offset), 0), os.pread(file.fileno(), offset - start, start)
