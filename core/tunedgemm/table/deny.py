"""Deny lists: kernels that must serve no call, by shape, device and version. Torch-free.

A deny list is a CSV whose columns are those of tables, with the reason and the date. An empty cell
or ``*`` is any value, but an empty op is a16w16, as in AITER's file. AITER's list
(``AITER_GEMM_UNSUPPORTED_CSV``) names shapes without a libtype, so it denies all but torch.
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from tunedgemm.backends.split_bias import without_add
from tunedgemm.device import Device
from tunedgemm.dtype import parse_dtype
from tunedgemm.errors import TableError, UserError
from tunedgemm.libtypes import BUILTIN
from tunedgemm.ops import DEFAULT_OP, op_named, ops
from tunedgemm.process.paths import expanded
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Problem, problem_lines
from tunedgemm.table.distributions import DENY_FILE, distributions
from tunedgemm.table.folders import home_folder
from tunedgemm.table.row import blank
from tunedgemm.table.sheet import LOCK_TIMEOUT, Record, Sheet, locked, present, read_sheet, replace_text
from tunedgemm.text.printable import warn_once

#: Variables that name deny lists: ours, of several files, and AITER's.
VARIABLES = ("TUNEDGEMM_DENY", "AITER_GEMM_UNSUPPORTED_CSV")
#: Columns of every entry; those of its op follow.
COLUMNS = ("op", "libtype", "kernelName", "splitK", "libver", "gfx", "cu_num", "reason", "date")
ANY = "*"


@attrs.frozen
class Denial:
    """One entry of a deny list; "" stands for any value.

    Attributes:
        op: name of the op; ``*`` for every op.
        fields: (column, text) of the op's columns that a shape must have.
        libtype, kernel: backend and kernel; "" for every backend but torch, and for every kernel. A
            kernel's name denies it with a bias added afterwards, too.
        split_k: its splits of K.
        libver: start of the library's version.
        gfx, cu_num: the device; "" for any.
        reason, date: why and since when, for messages.
        source: the list's file and line.
    """

    op: str = DEFAULT_OP
    fields: tuple[tuple[str, str], ...] = ()
    libtype: str = ""
    kernel: str = ""
    split_k: str = ""
    libver: str = ""
    gfx: str = ""
    cu_num: str = ""
    reason: str = ""
    date: str = ""
    source: str = attrs.field(default="", eq=False)

    def __attrs_post_init__(self) -> None:
        if self.libtype == BUILTIN:
            raise UserError(f"libtype must be another than {BUILTIN}, which serves what no other may; name a backend or {ANY}")
        of = ops().values() if self.op == ANY else (op_named(self.op),)
        known = dict.fromkeys(column for op in of for column in (*op.columns.key, *op.columns.own))
        if unknown := [column for column, _ in self.fields if column not in known]:
            owner = "no op has a" if self.op == ANY else f"{self.op} has no"
            raise UserError(f"{owner} column {unknown[0]!r}; use {', '.join(known)}")

    @classmethod
    def of_record(cls, path: Path, record: Record) -> Denial:
        """Parse a line of a deny list.

        Raises:
            UserError: it names an unknown op or column, or torch.
        """
        cells = {column: "" if text == ANY else text for column, text in record.cells.items()}
        fields = tuple((column, text) for column, text in cells.items() if text and column not in COLUMNS)
        op = record.cells.get(COLUMNS[0], "")
        libtype, kernel, split_k, libver, gfx, cu_num, reason, date = (cells.get(column, "") for column in COLUMNS[1:])
        if not fields and not any(record.cells.get(column) for column in COLUMNS[:3]):
            raise UserError(f"names neither an op, a libtype, a kernel nor a size; write {ANY} as its libtype to deny all of an op")
        return cls(op or DEFAULT_OP, fields, libtype, kernel, split_k, libver, gfx, cu_num, reason, date, f"{path}:{record.line}")

    def cells(self) -> dict[str, str]:
        """Return the entry as texts by column."""
        own = (self.op, self.libtype, self.kernel, self.split_k, self.libver, self.gfx, self.cu_num, self.reason, self.date)
        return {**dict(zip(COLUMNS, own, strict=True)), **dict(self.fields)}

    def covers(self, shape: Shape, device: Device) -> bool:
        """Check whether a call's shape and device are those of the entry."""
        here = self.gfx.lower() in ("", device.gfx) and self.cu_num in ("", str(device.cu_num))
        if self.op not in (ANY, shape.op) or not here:
            return False
        texts = op_named(shape.op).columns.format(shape)
        return all(_same(text, texts.get(column, "")) for column, text in self.fields)

    def denies(self, solution: Solution, version_of: Callable[[str], str]) -> bool:
        """Check whether a solution of a covered shape is denied; see `DenyList.against`."""
        names = ("", solution.kernel_name, without_add(solution).kernel_name)
        if self.libtype not in ("", solution.libtype) or self.kernel not in names or solution.libtype == BUILTIN:
            return False
        if self.split_k not in ("", str(solution.split_k)):
            return False
        return not self.libver or bool(re.match(rf"{re.escape(self.libver)}(?![0-9A-Za-z])", version_of(solution.libtype)))

    def text(self) -> str:
        """Format what is denied, such as ``hipblaslt:k7 for a16w16 with M=16 on gfx942``."""
        kernel = f"{self.libtype or 'every backend'}:{self.kernel or 'every kernel'}" + (
            f" with splitK {self.split_k}" if self.split_k else ""
        )
        shape = f" with {' '.join(f'{column}={text}' for column, text in self.fields)}" if self.fields else ""
        device = "/".join(filter(None, (self.gfx, self.cu_num)))
        return (
            f"{kernel} for {'every op' if self.op == ANY else self.op}{shape}"
            + (f" on {device}" if device else "")
            + (f", version {self.libver}" if self.libver else "")
        )

    def why(self) -> str:
        """Format the reason and the date."""
        return (self.reason or "no reason is stated") + (f" ({self.date})" if self.date else "")

    def __str__(self) -> str:
        return f"denied by {self.source}: {self.why()}"


def _same(text: str, other: str) -> bool:
    """Check whether two texts of a column mean one value: of any case, numbers and dtypes of any spelling."""
    first, second = ({"0": "false", "1": "true"}.get(each.lower(), each.lower()) for each in (text, other))
    if first == second or (text.isdecimal() and other.isdecimal() and int(text) == int(other)):
        return True
    try:
        return parse_dtype(text) == parse_dtype(other)
    except UserError:
        return False


@attrs.frozen
class DenyList:
    """The entries of all deny lists.

    Attributes:
        entries: by precedence of the files.
        problems: lines that deny nothing.
    """

    entries: tuple[Denial, ...] = ()
    problems: tuple[Problem, ...] = ()

    @classmethod
    def load(cls, paths: Sequence[Path] | None = None) -> DenyList:
        """Read deny lists; warn once about each line that cannot be used.

        Args:
            paths: the files, instead of `deny_paths`.
        """
        entries: list[Denial] = []
        problems: list[Problem] = []
        for path in deny_paths() if paths is None else paths:
            read, faults = read_denials(path)
            entries += read
            problems += faults
        whole = [str(problem) for problem in problems if not problem.line]
        for text in (*whole, *problem_lines(problem for problem in problems if problem.line)):
            warn_once(f"a deny list: {text}")
        return cls(tuple(entries), tuple(problems))

    def against(self, shape: Shape, device: Device, version_of: Callable[[str], str]) -> Callable[[Solution], str] | None:
        """Return a function from a solution to the entry that denies it, or ""; None without entries.

        Args:
            version_of: returns the version of a libtype's library; asked where an entry names one.
        """
        covering = [entry for entry in self.entries if entry.covers(shape, device)]
        if not covering:
            return None
        return lambda solution: next((str(entry) for entry in covering if entry.denies(solution, version_of)), "")


def deny_paths() -> tuple[Path, ...]:
    """Return the deny lists: of the variables, of the user's folder, of distributions."""
    named = [expanded(text.strip(), name) for name in VARIABLES for text in os.environ.get(name, "").split(os.pathsep) if text.strip()]
    others = [user_list(), *(path for found in distributions() for path in found.deny_lists)]
    return (*named, *(path for path in others if present(path)))


def user_list() -> Path:
    """Return the deny list in the user's folder."""
    return home_folder() / DENY_FILE


def read_denials(path: Path) -> tuple[list[Denial], list[Problem]]:
    """Return the entries of a deny list, and the lines that deny nothing; an unusable file is one problem."""
    try:
        sheet = read_sheet(path, whole=False)
    except TableError as error:
        return [], [Problem(path, 0, str(error))]
    entries: list[Denial] = []
    problems = [Problem(path, *sheet.cut)] if sheet.cut else []
    for record in _lines(sheet):
        try:
            entries.append(Denial.of_record(path, record))
        except UserError as error:
            problems.append(Problem(path, record.line, str(error)))
    return entries, problems


def _lines(sheet: Sheet) -> Iterator[Record]:
    return (record for record in sheet.records if not blank(record))


def add_denial(path: Path, denial: Denial, timeout: float = LOCK_TIMEOUT) -> bool:
    """Add an entry to a deny list, which need not exist; return False if it has the entry.

    An entry without a date gets today's.

    Args:
        timeout: longest wait for another process that writes it, in seconds.

    Raises:
        TableError: the file cannot be read or written.
    """
    today = datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat()
    cells = {column: text for column, text in attrs.evolve(denial, date=denial.date or today).cells().items() if text}
    with locked(path, timeout):
        sheet = read_sheet(path) if present(path) else Sheet(list(COLUMNS), [])
        if any(_identity(record.cells) == _identity(cells) for record in _lines(sheet)):
            return False
        sheet.columns += [column for column in cells if column not in sheet.columns]
        sheet.records.append(Record(cells=cells))
        replace_text(path, sheet.text())
    return True


def _identity(cells: Mapping[str, str]) -> dict[str, str]:
    """Return what an entry denies, without its reason and date."""
    return {column: text for column, text in cells.items() if text not in ("", ANY) and column not in ("reason", "date")}
