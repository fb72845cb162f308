"""Trial log: JSON lines that runs append to, and that a resumed run reuses.

Every line is an object with ``schema`` and, from schema 2 on, ``kind``. ``run`` opens a run,
``trial`` is one `Timing`, ``shape`` is the outcome of one shape, ``end`` closes a complete run. The
lines of schema 1 are trials of an unknown run.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from tunedgemm.device import Device
from tunedgemm.errors import ShapeError, TableError, TunedGemmError
from tunedgemm.ops import ops
from tunedgemm.process.files import open_regular
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.row import key_shape
from tunedgemm.table.sheet import extend, present
from tunedgemm.timing import SCHEMA, Timing

_log = logging.getLogger("tunedgemm")

#: Prefix of every line. Such a line that is not JSON was truncated by a kill or a full disk.
_BEGINNING = '{"schema": '

#: Prefix that `line` writes, with kind and run.
_WRITTEN = re.compile(r'\{"schema": \d+, "kind": "(\w+)", "run": "([^"\\]*)"')

#: Kinds of lines with their required fields; schema 1 has no kinds.
_KINDS = {
    "run": ("run", "op"),
    "trial": ("shape", "solution", "status"),
    "shape": ("run", "gfx", "cu_num", "device", "shape", "winner"),
    "end": ("run",),
}

#: Types of the scalar fields that are read here; `Timing` checks the others.
_SCALARS: tuple[type, ...] = (str, int, float, bool, type(None))
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("kind", "run", "op", "gfx", "device", "libver"), (str,)),
    **dict.fromkeys(("shape", "solution", "identity", "drivers"), (dict,)),
    **dict.fromkeys(("winner", "incumbent"), (dict, type(None))),
    **dict.fromkeys(("us", "noise", "err_ratio"), (int, float)),
    **dict.fromkeys(("cu_num", "samples", "clock_mhz"), (int,)),
    "resumes": (list,),
}

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

#: Largest plausible number of a measurement; a year has 3e13 microseconds.
_MOST = 1e18


def trials_path(table: Path) -> Path:
    """Return the path of a table's trial log, in the table's folder."""
    return table.parent / f"{table.name.removesuffix('.csv')}.trials.jsonl"


@attrs.frozen
class Line:
    """One line of a trial log; *fields* are parsed from *text*."""

    path: Path
    number: int
    text: str
    fields: dict[str, Any]

    @property
    def kind(self) -> str:
        """Return ``run``, ``trial``, ``shape`` or ``end``."""
        return str(self.fields.get("kind", "trial"))

    @property
    def run(self) -> str:
        """Return the id of the run that wrote the line; "" in schema 1."""
        return str(self.fields.get("run", ""))

    @property
    def subject(self) -> str:
        """Return device and shape as one JSON text, to group lines."""
        return json.dumps([self.fields.get(name) for name in ("gfx", "cu_num", "device", "shape")], sort_keys=True)

    def timing(self) -> Timing:
        """Return the trial.

        Raises:
            TableError: the line has an invalid value.
        """
        with self.naming():
            return Timing.from_json(self.text)

    def where(self) -> tuple[Device, Shape]:
        """Return the device, without its index, and the shape.

        Raises:
            TableError: a field is missing or invalid.
        """
        with self.naming():
            fields = self.fields
            device, shape = Device(fields["gfx"], fields["cu_num"], fields["device"]), Shape.from_dict(fields["shape"])
            _check_shape(shape, device.gfx)
            return device, shape

    def solution(self, field: str) -> Solution | None:
        """Return the solution in a field; None if it has none.

        Raises:
            TableError: the field is invalid.
        """
        with self.naming():
            fields = self.fields.get(field)
            return None if fields is None else Solution.from_dict(fields)

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Convert errors in the line's values to TableErrors with file and line."""
        try:
            yield
        except (TunedGemmError, ValueError, KeyError) as error:
            fault = f"lacks {error}" if isinstance(error, KeyError) else error.args[0] if error.args else type(error).__name__
            raise TableError(f"{self.path}:{self.number}: not a {self.kind}: {fault}; {_MEND}") from error


@functools.lru_cache(maxsize=4096)
def _check_shape(shape: Shape, gfx: str) -> None:
    """Raise ShapeError for a shape that no call of its op can have."""
    op = ops().get(shape.op)
    if op is None:
        return
    try:
        texts = {column: text for column, text in op.columns.format(shape).items() if text}
        read = op.columns.parse(texts | {"gfx": gfx})
    except (TunedGemmError, ValueError, KeyError, TypeError) as error:
        raise ShapeError(f"no shape of {op.name}: {error.args[0] if error.args else type(error).__name__}") from None
    if key_shape(read) != key_shape(shape):
        raise ShapeError(f"no shape of {op.name} (got {shape}; its tables have {read})")


_MOVE = "move the file away, and the next run starts a new one"
_MEND = f"delete that line, or {_MOVE}"


def read_log(path: Path, *, kinds: Collection[str] = (), without: Collection[str] = ()) -> Iterator[Line]:
    """Yield the lines of a trial log in order; skip truncated lines with a warning.

    Args:
        kinds: kinds of lines to yield; () for all. Others are skipped unparsed if possible.
        without: ids of runs whose trials, which may be most of a log, are skipped likewise.

    Raises:
        TableError: the file is unreadable, not a trial log, or of a newer schema.
    """
    try:
        with open_regular(path) as file:
            for number, raw in enumerate(file, 1):
                # on some file systems, a power cut leaves zero bytes
                text = raw.decode("utf-8", "replace").strip("\0 \t\r\n\ufeff")
                beginning = _WRITTEN.match(text) if kinds or without else None
                if beginning and ((kinds and beginning[1] not in kinds) or (beginning[1] == "trial" and beginning[2] in without)):
                    continue
                if text and (fields := _fields(path, number, text)) is not None:
                    entry = Line(path, number, text, fields)
                    if not kinds or entry.kind in kinds:
                        yield entry
    except OSError as error:
        raise TableError(f"{path}: cannot be read: {error.strerror or error}; {_MOVE}") from error


def _fields(path: Path, number: int, text: str) -> dict[str, Any] | None:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        if text.startswith(_BEGINNING) or (number == 1 and _BEGINNING.startswith(text) and len(text) > 1):
            _log.warning("%s:%d: skipped a partial line of a killed writer", path, number)
            return None
        raise TableError(f"{path}:{number}: not a line of a trial log (got {text[:40]!r}: {error}); {_MEND}") from None
    schema = fields.get("schema") if isinstance(fields, dict) else None
    if isinstance(schema, bool) or not isinstance(schema, int) or schema < 1:
        raise TableError(f"{path}:{number}: not a line of a trial log: not a JSON object with a 'schema' (got {text[:40]!r}); {_MEND}")
    if schema > SCHEMA:
        raise TableError(
            f"{path}:{number}: was written by a newer tunedgemm (schema {schema}; this one reads 1 to {SCHEMA}); update, or {_MOVE}"
        )
    if fault := _fault(fields, text):
        raise TableError(f"{path}:{number}: not a line of a trial log: {fault}; {_MEND}")
    return dict(fields)


def _fault(fields: dict[str, Any], text: str) -> str:
    """Return why an object is not a valid line of a trial log, or ""."""
    if _SURROGATE.search(text) and not _is_text(fields):
        return "has half of a surrogate pair, which no file can hold"
    for name, value in fields.items():
        types = _TYPES.get(name)
        if types is not None and (type(value) not in types or not _is_flat(value)):
            return f"{name!r} has a value of another type (got {str(value)[:40]!r})"
        if types is not None and types[0] is int and not 0 <= value <= _MOST:
            return f"{name!r} must be a number from 0 to {_MOST:g} (got {str(value)[:40]})"
    kind = fields.get("kind", "trial")
    if kind not in _KINDS:
        return f"'kind' must be one of {', '.join(_KINDS)} (got {kind[:40]!r})"
    missing = [name for name in _KINDS[kind] if name not in fields]
    if not missing and kind == "shape" and fields["winner"] and fields.get("us") == 0:
        return "'us' of a winner must be above 0 (got 0)"
    return f"lacks {missing[0]!r}" if missing else ""


def _is_text(fields: dict[str, Any]) -> bool:
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True


def _is_flat(value: Any) -> bool:
    """Check that a value nests no deeper than a shape, whose ``extra`` is an object of scalars."""
    if type(value) is list:
        return all(type(item) is str for item in value)
    items = value.values() if type(value) is dict else ()
    return all(type(item) in _SCALARS or (type(item) is dict and all(type(part) in _SCALARS for part in item.values())) for item in items)


def line(kind: str, run: str, **fields: Any) -> str:
    """Format a line."""
    return json.dumps({"schema": SCHEMA, "kind": kind, "run": run, **fields}) + "\n"


def append(path: Path, lines: Iterable[str]) -> None:
    """Append whole lines in one write; the caller holds `locked`.

    Raises:
        TableError: the file cannot be written or the disk is full; earlier lines are kept.
    """
    data = "".join(lines).encode()
    try:
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)  # the umask applies
        try:
            _extend(handle, data)
        finally:
            os.close(handle)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        hint = "free some space and run the same command again, which resumes from here" if full else "name another output file"
        raise TableError(f"{path}: cannot be written: {error.strerror or error}; {hint}") from error


def _extend(handle: int, data: bytes) -> None:
    size = os.fstat(handle).st_size
    if size and os.pread(handle, 1, size - 1) != b"\n":  # do not continue a truncated line
        data = b"\n" + data
    extend(handle, data)


@attrs.define
class History:
    """Earlier runs in a trial log.

    Attributes:
        runs: the ``run`` line of each run, by its id.
        ended: ids of the complete runs.
        lines: trials of interrupted runs and outcomes of all runs, in file order.
    """

    runs: dict[str, Line] = attrs.field(factory=dict)
    ended: set[str] = attrs.field(factory=set)
    lines: list[Line] = attrs.field(factory=list)

    @classmethod
    def read(cls, path: Path) -> History:
        """Read a log; a missing one gives an empty history.

        Raises:
            TableError: see `read_log`.
        """
        history = cls()
        if not present(path):
            return history
        history.ended = {entry.run for entry in read_log(path, kinds=("end",))}
        for entry in read_log(path, without=history.ended):
            if entry.kind == "run":
                history.runs[entry.run] = entry
            elif entry.kind != "end" and entry.run in history.runs:
                history.lines.append(entry)
        history.lines = [entry for entry in history.lines if entry.kind == "shape" or entry.run not in history.ended]
        return history

    def reusable(self, op: str, identity: Mapping[str, str], alive: Collection[str]) -> Reusable:
        """Return the reusable trials and outcomes of interrupted runs.

        Args:
            op: name of the op.
            identity: options and versions that must be equal for trials to be comparable.
            alive: ids of the runs in progress. Trials resumed by them or by an ended run are not
                reusable.
        """
        headers = [self.runs[run] for run in {*alive, *self.ended} if run in self.runs]
        resumed = {run for header in headers for run in header.fields.get("resumes", ())}
        usable = set()
        for run, header in self.runs.items():
            if run in self.ended or run in alive or run in resumed or header.fields.get("op") != op:
                continue
            if differing := _differing(header.fields.get("identity", {}), identity):
                _log.info("%s: the trials of the interrupted run %s are not reused: it had %s", header.path, run, differing)
            else:
                usable.add(run)
        left: dict[str, list[Line]] = {}
        last: dict[str, int] = {}
        for entry in self.lines:
            if entry.run in usable:
                left.setdefault(entry.subject, []).append(entry)
            elif entry.kind == "shape":
                left.pop(entry.subject, None)
            if entry.kind == "shape":
                last[entry.run] = entry.number
        return Reusable(tuple(tuple(lines) for lines in left.values()), frozenset(last.values()))


@attrs.frozen
class Reusable:
    """Lines that a run may reuse.

    Attributes:
        subjects: trials and outcomes per device and shape, in file order.
        last: line numbers of each run's last outcome, whose row may not have been written.
    """

    subjects: tuple[tuple[Line, ...], ...] = ()
    last: frozenset[int] = frozenset()

    @property
    def runs(self) -> list[str]:
        """Return the runs that wrote these lines."""
        return sorted({entry.run for lines in self.subjects for entry in lines})


def _differing(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Return the differences between two identities as text, "" if they are equal."""
    names = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
    return ", ".join(f"{name} {theirs.get(name, 'unset')!r} instead of {ours.get(name, 'unset')!r}" for name in names)
