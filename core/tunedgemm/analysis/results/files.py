"""The files of a run: what kind each is, its lines, and the lines that cannot be read."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

import attrs

from tunedgemm.errors import TableError, UserError
from tunedgemm.ops import op_named, ops
from tunedgemm.ops.op import Op
from tunedgemm.process.files import largest_file, open_regular
from tunedgemm.table.columns import is_tuned, sizes
from tunedgemm.table.csvfile import Problem, infer_op
from tunedgemm.table.folders import is_table_name
from tunedgemm.table.sheet import may_be_header
from tunedgemm.text.printable import printable_line

#: Damaged lines of a file that the report names; of the others only the number is shown.
NAMED = 5
#: Longest line of a file, in bytes; a trial with its reason has less than a hundredth.
_LONGEST = 1 << 20
#: Columns by which a profile, the tuner's ``-o2``, differs from a table.
_OF_PROFILE = {"kernelName", "libtype", "status", "noise", "samples"}
#: Columns of a profile beyond its op's key.
_BEYOND_KEY = {"gfx", "cu_num", "solidx", "splitK", "us", "err_ratio", "row_error", "tflops", "bw", "detail", *_OF_PROFILE}
_GZIP = b"\x1f\x8b"


@attrs.define
class Faults:
    """The unreadable lines of one file.

    Attributes:
        path: the file.
        count: how many there are.
        named: the first of them.
    """

    path: Path
    count: int = 0
    named: list[str] = attrs.field(factory=list)

    def add(self, line: int, reason: str) -> None:
        """Count an unreadable line, and name it if it is among the first."""
        self.count += 1
        if len(self.named) < NAMED:
            self.named.append(printable_line(f"line {line}: {reason}" if line else reason)[:300])

    def add_all(self, problems: Iterable[Problem]) -> None:
        """Count the problems of a table or list."""
        for problem in problems:
            self.add(problem.line, problem.reason)


def kind_of(path: Path) -> str:
    """Return ``log``, ``profile``, ``table`` or ``list`` by a file's first line.

    Raises:
        TableError: the file cannot be read, or is none of these.
    """
    first = next((text for _, text in lines_of(path, Faults(path)) if may_be_header(text)), "")
    if first.lstrip().startswith("{"):
        return "log"
    header = first.splitlines()[:1]  # a lone carriage return also ends a line
    with contextlib.suppress(csv.Error):
        header = next(csv.reader(header), [])
    columns = {column.strip() for column in header}
    if columns >= _OF_PROFILE:
        return "profile"
    if any({*sizes(op)} <= columns for op in ops().values()):
        return "table" if is_tuned(columns) else "list"
    shown = printable_line(first[:60])
    raise TableError(f"{path}: not a table, trial log, profile or list of shapes (got {shown!r}); name a file that the tuner wrote")


def is_packed(path: Path) -> bool:
    """Tell whether a file is packed with gzip."""
    with open_regular(path) as file:
        return file.read(2) == _GZIP


def lines_of(path: Path, faults: Faults) -> Iterator[tuple[int, str]]:
    """Yield the numbers and texts of a file's lines, unpacked where it is a gzip file.

    A packed file that ends too early, and a line that is too long, are faults.

    Raises:
        TableError: the file cannot be read.
    """
    number, left = 0, largest_file()
    try:
        with open_regular(path) as file:
            packed = file.peek(2)[:2] == _GZIP if isinstance(file, io.BufferedReader) else False
            stream = cast("BinaryIO", gzip.GzipFile(fileobj=file)) if packed else file
            while raw := stream.readline(_LONGEST):
                number += 1
                left -= len(raw)
                if len(raw) == _LONGEST or left < 0:
                    raise TableError(f"{path}:{number}: longer than this command reads; split the file")
                # a power cut leaves zero bytes behind on some file systems
                yield number, raw.decode("utf-8", "replace").strip("\0\ufeff").replace("\0", "\ufffd")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        faults.add(number + 1, f"the gzip file is damaged from here on: {error}")
    except OSError as error:
        raise TableError(f"{path}: cannot be read: {error.strerror or error}; name another file") from error


def op_of_table(path: Path, named: str) -> Op:
    """Return the op of a table: the named one, else by its columns and name.

    A name that begins with an op and a dash, as ``a8w8_blockscale-tuned.csv``, decides between ops
    with equal columns.

    Raises:
        UserError: they decide for none.
    """
    if named:
        return op_named(named)
    try:
        return infer_op([path])
    except TableError:
        raise
    except UserError:
        if path.name.partition("-")[0] in ops():
            return op_named(path.name.partition("-")[0])
        raise


def op_of_profile(path: Path, columns: Iterable[str], named: str) -> Op:
    """Return the op of a profile: the named one, else by its columns, then by its name.

    Raises:
        UserError: its columns fit none or several ops, and the name decides for none.
    """
    if named:
        return op_named(named)
    shaped = {*columns} - _BEYOND_KEY
    fitting = [op for op in ops().values() if {*op.columns.key} <= shaped <= {*op.columns.key, *op.columns.own}]
    if not fitting:
        raise UserError(f"{path}: a profile whose columns fit no op (got {', '.join(sorted(shaped))[:200]}); name its op with --op")
    lacking = {op.name: len({*op.columns.own} - shaped) for op in fitting}
    nearest = [op for op in fitting if lacking[op.name] == min(lacking.values())]
    words = [op for op in nearest if is_table_name(path.name, op) or path.name.startswith(f"{op.name}-")]
    if len(words or nearest) > 1:
        raise UserError(f"{path}: the columns fit {' and '.join(op.name for op in nearest)}; name one with --op")
    return (words or nearest)[0]
