"""Tuned and untuned CSV files of an op: AITER's formats read with tolerance, and rewritten without losing anything."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from tunedgemm.errors import TableError, TunedGemmError
from tunedgemm.libtypes import canonical
from tunedgemm.shape import Shape
from tunedgemm.sheet import Record, Sheet, locked, read_sheet, replace_text
from tunedgemm.solution import Solution

if TYPE_CHECKING:
    from tunedgemm.ops.op import Op

#: our columns, appended to AITER's; "" and AITER's filler 0 mean absent
APPENDED = ("device", "layout", "scale", "libver")

#: columns of an untuned file beyond its op's key
UNTUNED_EXTRA = ("count", "graph", "layout", "scale")

#: key columns that a file may lack, as AITER's older files do; the op's parser knows their defaults
_DEFAULTED = ("bias", "dtype", "outdtype", "scaleAB", "bpreshuffle")

#: other names of a column in AITER's and gradlib's files
_SYNONYMS = {"soltimes": "us", "kernelId": "solidx", "errRatio": "err_ratio"}

#: columns of `Columns.values` with a meaning here; further ones belong to the op and go to `Solution.extra`
_KNOWN = ("libtype", "solidx", "splitK", "us", "kernelName", "err_ratio", "tflops", "bw")

#: how pandas and others write that there is no value
_NOTHING = ("", "nan", "na", "n/a", "<na>", "none", "null")

#: CU counts of AITER's legacy files, which have no gfx column (facts of its chip_info)
_GFX_OF_CUS = {256: "gfx950", 80: "gfx942", 304: "gfx942"}

#: AITER's tables of ops with one C++ backend have no libtype: the kernel's name tells
_LIBTYPE_OF_KERNEL = {"_ZN5aiter": "asm", "flydsl_": "flydsl"}


def key_shape(shape: Shape) -> Shape:
    """The shape as tables know it: with the default bias dtype, which is no part of a table's key."""
    if not shape.bias or shape.bias_dtype == shape.dtype:
        return shape
    return attrs.evolve(shape, bias_dtype="")


def _one_line(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    if not isinstance(value, str) or "\n" in value or "\r" in value:
        raise TableError(f"{attribute.name!r} must be text on one line (got {value!r})")


@attrs.frozen
class Problem:
    """What is wrong with a line of a file, or with the whole of it (line 0)."""

    path: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}" if self.line else self.reason


@attrs.frozen
class Row:
    """One row of a tuned table.

    Attributes:
        shape: with the default bias dtype; m = 0 pins one solution for every M (batch invariance).
        gfx: the architecture, "" for any.
        cu_num: compute units, multiprocessors or threads of the device.
        device: slug of the device's name, "" where the file does not tell.
        solution: what to launch.
        us: time of one call in microseconds.
        err_ratio: share of wrong elements when it was tuned.
        libver: version of the backend's library then, "" where the kernel's name carries a revision.
        source, line: where the row was read; line 0 for a row that was not.
        extra: columns unknown here, as (name, text) pairs.
    """

    shape: Shape = attrs.field(converter=key_shape)
    gfx: str = attrs.field(validator=attrs.validators.matches_re(r"[a-z0-9_.-]*"))
    cu_num: int = attrs.field(validator=attrs.validators.ge(0))
    device: str = attrs.field(validator=_one_line)
    solution: Solution
    us: float
    err_ratio: float = 0.0
    libver: str = attrs.field(default="", validator=_one_line)
    source: Path = attrs.field(default=Path(), eq=False)
    line: int = attrs.field(default=0, eq=False)
    extra: tuple[tuple[str, str], ...] = ()

    @property
    def valid(self) -> bool:
        """Whether the row may win: its time is a finite number above 0."""
        return 0.0 < self.us < math.inf

    @property
    def key(self) -> tuple[str, int, str, Shape]:
        """What `upsert` replaces: device and shape."""
        return self.gfx, self.cu_num, self.device, self.shape


@attrs.frozen
class Untuned:
    """A shape to tune, and how often it was met."""

    shape: Shape
    count: int = 1


def read_rows(path: Path, op: Op) -> tuple[list[Row], list[Problem]]:
    """Read a tuned table. A line that cannot be used is a problem and the others load; a row with a time of 0 or less is both.

    Raises:
        TableError: the file cannot be read, or lacks a column without which no row says anything.
    """
    rows: list[Row] = []
    problems: list[Problem] = []
    sheet = _read_tuned(path, op)
    unknown = tuple(column for column in sheet.columns if column not in _order(op, ()))
    for record in sheet.records:
        try:
            row = _row(path, record, op, unknown)
        except (TunedGemmError, ValueError) as error:
            problems.append(Problem(path, record.line, str(error)))
            continue
        rows.append(row)
        if not row.valid:
            problems.append(Problem(path, record.line, f"'us' must be above 0 (got {row.us}): the row is never chosen"))
    return rows, problems


def read_untuned(path: Path, op: Op) -> list[Untuned]:
    """Read a list of shapes to tune, in order; rows of one shape are folded and their counts added.

    Raises:
        TableError: the file cannot be read, has a column that means nothing here, or a line that is no shape.
    """
    sheet = read_sheet(path)
    known = (*op.columns.key, *UNTUNED_EXTRA)
    if unknown := [column for column in sheet.columns if column not in known]:
        raise TableError(
            f"{path}: unknown column {', '.join(map(repr, unknown))}; an untuned file of {op.name} may have {', '.join(known)}"
        )
    _require(path, sheet, [column for column in op.columns.key if column not in _DEFAULTED])
    counts: dict[Shape, int] = {}
    for record in sheet.records:
        if _blank(record):
            continue
        try:
            shape, count = untuned_of(record, op)
        except (TunedGemmError, ValueError) as error:
            raise TableError(f"{path}:{record.line}: {error}") from None
        counts[shape] = counts.get(shape, 0) + count
    return [Untuned(shape, count) for shape, count in counts.items()]


def untuned_of(record: Record, op: Op) -> tuple[Shape, int]:
    """The shape and the count of one line of an untuned file; a line without a count stands for one call.

    Raises:
        UserError: the line is no shape that can be tuned.
    """
    shape, count = _shape(record, op), _whole(record.cells, "count", 1)
    if shape.m < 1:
        raise TableError("'M' must be at least 1 (got 0): there is nothing to tune in an empty batch")
    if count < 0:
        raise TableError(f"'count' must not be negative (got {count})")
    return shape, count


def write_rows(path: Path, op: Op, rows: Iterable[Row]) -> None:
    """Write a table of these rows in their order, replacing the file.

    Raises:
        TableError: the folder cannot be written.
    """
    records = [_record_of(row, op) for row in rows]
    with locked(path):
        replace_text(path, Sheet(_order(op, _columns_of(records)), records).text())


def upsert(path: Path, op: Op, rows: Iterable[Row], sort: bool = True) -> None:
    """Put rows into a table: those of the same device and shape are replaced, all others stay, understood or not.

    The file is read again under its lock, so that several processes may write one table.

    Args:
        sort: order the file by gfx, cu_num, N, M, K and the rest of the key, as AITER does; else rows keep their places.

    Raises:
        TableError: the file or its folder cannot be read or written; the file is left as it was.
    """
    fresh = {row.key: _record_of(row, op) for row in rows}
    waiting = dict(fresh)
    with locked(path):
        sheet = _read_tuned(path, op) if path.exists() else Sheet([], [])
        records: list[Record] = []
        for record in sheet.records:
            key = _key(record, op)
            if key is None or key not in fresh:
                records.append(record)
            elif key in waiting:
                records.append(waiting.pop(key))
        records += waiting.values()
        if sort:
            records.sort(key=lambda record: _sort_key(record, op))
        columns = _order(op, [*sheet.columns, *_columns_of(records)])
        replace_text(path, Sheet(columns, records).text())


def _read_tuned(path: Path, op: Op) -> Sheet:
    """A tuned file without its blank lines, its columns named as the op names them."""
    sheet = read_sheet(path)
    own = _own_names(op)
    renamed = {column: own.get(_SYNONYMS.get(column, column), column) for column in sheet.columns}
    renamed = {old: new for old, new in renamed.items() if old != new and new not in sheet.columns}
    sheet.columns = [renamed.get(column, column) for column in sheet.columns]
    sheet.records = [record for record in sheet.records if not _blank(record)]
    if renamed:
        for record in sheet.records:
            record.cells = {renamed.get(column, column): text for column, text in record.cells.items()}
    key = [column for column in op.columns.key if column not in _DEFAULTED]
    _require(path, sheet, ["cu_num", *key, *(own[name] for name in ("libtype", "us") if name in own)])
    return sheet


def _require(path: Path, sheet: Sheet, columns: Iterable[str]) -> None:
    if missing := [column for column in columns if column not in sheet.columns]:
        found = ", ".join(sheet.columns)[:200]
        raise TableError(
            f"{path}: lacks the column {', '.join(map(repr, missing))} (its first line reads {found}); is it a file of another op?"
        )


@functools.cache
def _own_names(op: Op) -> Mapping[str, str]:
    """Our name of a value column -> the op's: ``solidx`` -> ``kernelId`` where AITER calls it so."""
    return {_SYNONYMS.get(column, column): column for column in op.columns.values}


def _order(op: Op, columns: Iterable[str]) -> list[str]:
    """AITER's columns in AITER's order, ours, then those of *columns* that are neither."""
    return list(dict.fromkeys(("gfx", "cu_num", *op.columns.key, *op.columns.values, *_appended(op), *columns)))


def _appended(op: Op) -> tuple[str, ...]:
    return APPENDED if "libtype" in op.columns.values else ("libtype", *APPENDED)


def _columns_of(records: Iterable[Record]) -> list[str]:
    return list(dict.fromkeys(column for record in records for column in record.cells))


def _blank(record: Record) -> bool:
    return not record.raw and not record.surplus and not any(_present(text) for text in record.cells.values())


def _present(text: str) -> str:
    return "" if text.lower() in _NOTHING else text


def _get(cells: Mapping[str, str], column: str) -> str:
    """The text of a column that may be absent."""
    return _present(cells.get(column, ""))


def _ours(cells: Mapping[str, str], column: str) -> str:
    """The text of a column in which AITER's merge may have put its filler, 0."""
    text = _get(cells, column)
    return "" if text in ("0", "0.0") else text


def _number(cells: Mapping[str, str], column: str, default: float) -> float:
    text = _get(cells, column)
    try:
        return (float(text[:-1]) / 100 if text.endswith("%") else float(text)) if text else default
    except ValueError:
        raise TableError(f"{column!r} must be a number (got {text[:40]!r})") from None


def _whole(cells: Mapping[str, str], column: str, default: int) -> int:
    number = _number(cells, column, default)
    if not math.isfinite(number) or number != int(number):
        raise TableError(f"{column!r} must be a whole number (got {cells[column][:40]!r})")
    return int(number)


def _shape(record: Record, op: Op) -> Shape:
    if record.raw:
        raise TableError(f"is no line of a CSV file (unclosed quote, or left by a version control merge): {record.raw[:60]!r}")
    if record.surplus:
        raise TableError(f"has fields beyond the last column: {', '.join(record.surplus)[:60]!r}")
    texts = {column: text for column in op.columns.key if (text := _get(record.cells, column))}
    texts |= {column: text for column in ("layout", "scale") if (text := _ours(record.cells, column))}
    return op.columns.parse(texts)


def _place(record: Record) -> tuple[str, int, str]:
    """gfx, cu_num and device slug; a missing gfx is derived from the CU count as AITER's legacy files ask for."""
    if not _get(record.cells, "cu_num"):
        raise TableError("'cu_num' is empty")
    cu_num = _whole(record.cells, "cu_num", 0)
    return _ours(record.cells, "gfx").lower() or _GFX_OF_CUS.get(cu_num, ""), cu_num, _ours(record.cells, "device")


def _key(record: Record, op: Op) -> tuple[str, int, str, Shape] | None:
    """`Row.key` of a record; None for one that is not understood."""
    try:
        return (*_place(record), key_shape(_shape(record, op)))
    except (TunedGemmError, ValueError):
        return None


def _row(path: Path, record: Record, op: Op, unknown: tuple[str, ...]) -> Row:
    cells, own = record.cells, _own_names(op)
    shape = _shape(record, op)
    gfx, cu_num, device = _place(record)
    kernel_name = _get(cells, "kernelName")
    libtype = _get(cells, "libtype")
    if not libtype and "libtype" not in own:
        libtype = next((name for start, name in _LIBTYPE_OF_KERNEL.items() if kernel_name.startswith(start)), "ck")
    if not libtype:
        raise TableError("'libtype' is empty")
    solution = Solution(
        libtype=canonical(libtype),
        kernel_name=kernel_name,
        split_k=_whole(cells, "splitK", 0),
        solidx=_whole(cells, own.get("solidx", "solidx"), 0),
        extra=tuple((column, _get(cells, column)) for name, column in own.items() if name not in _KNOWN),
    )
    return Row(
        shape=shape,
        gfx=gfx,
        cu_num=cu_num,
        device=device,
        solution=solution,
        us=_number(cells, own.get("us", "us"), math.nan),
        err_ratio=_number(cells, own.get("err_ratio", "err_ratio"), 0.0),
        libver=_ours(cells, "libver"),
        source=path,
        line=record.line,
        extra=tuple((column, text) for column in unknown if (text := cells.get(column, ""))),
    )


def _record_of(row: Row, op: Op) -> Record:
    """A row as texts, rounded as AITER rounds: 0.1 ns, 0.01 TFLOPS, 0.01 GB/s."""
    measured = row.us if row.valid else math.inf
    values = {
        "libtype": row.solution.libtype,
        "solidx": str(row.solution.solidx),
        "splitK": str(row.solution.split_k),
        "us": str(round(row.us, 4)),
        "kernelName": row.solution.kernel_name,
        "err_ratio": str(round(row.err_ratio, 4)),
        "tflops": str(round(op.flops(row.shape) / measured / 1e6, 2)),
        "bw": str(round(op.bytes_moved(row.shape) / measured / 1e3, 2)),
    }
    own = {"libtype": "libtype", **_own_names(op)}
    cells = dict(row.extra) | {"gfx": row.gfx, "cu_num": str(row.cu_num), "device": row.device, "libver": row.libver}
    cells |= op.columns.format(row.shape)
    cells |= {column: values[name] for name, column in own.items() if name in values}
    cells |= {column: str(value) for column, value in row.solution.extra}
    return Record(cells=cells)


def _sort_key(record: Record, op: Op) -> list[tuple[int, float, str]]:
    """gfx, cu_num, then the op's key with N before M, numbers by value; lines that are not understood come last."""
    key = list(op.columns.key)
    if "M" in key and "N" in key:
        key.remove("M")
        key.insert(key.index("N") + 1, "M")
    if record.raw:
        return [(2, 0.0, "")]
    texts = [_ours(record.cells, "gfx"), *(record.cells.get(column, "") for column in ("cu_num", *key, "device"))]
    return [_ordered(text) for text in texts]


def _ordered(text: str) -> tuple[int, float, str]:
    try:
        number = float(text)
    except ValueError:
        return 1, 0.0, text
    return (1, 0.0, text) if math.isnan(number) else (0, number, "")
