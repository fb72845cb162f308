"""Row: one line of a tuned table, converted from and to the texts of a file; torch-free."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from tunedgemm.errors import TableError, TunedGemmError
from tunedgemm.libtypes import canonical, libtype_of_kernel, stand_in
from tunedgemm.ops import ops
from tunedgemm.ops.op import as_they_are
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.columns import BIT_CLASS, foreign_columns, own_names, sizes
from tunedgemm.table.sheet import LONGEST, Record
from tunedgemm.text.cell import MISSING, RULE, is_kept
from tunedgemm.text.printable import warn_once

if TYPE_CHECKING:
    from tunedgemm.ops.op import Op


#: columns of `Columns.values` that the core interprets; the op's further ones go to
#: `Solution.extra`
_KNOWN = ("libtype", "solidx", "splitK", "us", "kernelName", "err_ratio", "tflops", "bw")

#: CU counts of AITER's legacy files, which have no gfx column (from its chip_info)
_GFX_OF_CUS = {256: "gfx950", 80: "gfx942", 304: "gfx942"}

#: one architecture of each kind of fp8: a line for any device holds for both kinds
_ANY_GFX = ("gfx950", "gfx942")

#: the short form has no such columns: its lines hold for all these combinations
_ANY = {"bias": ("False", "True"), "dtype": ("bf16", "fp16")}

#: column and tag of rows that AITER never looks up: what it runs instead where flydsl is absent
UNUSED = ("_tag", "flydsl_fallback")

#: columns of which every file has one; in a line without sizes they mark a second header
_HEADS = {"M", "token", "cu_num"}

#: what AITER's merge writes into a column that a file lacks
FILLERS = ("0", "0.0")

#: digits of a number that a float holds exactly
_EXACT = 15

#: what `bit_class` may be: the first 16 hexadecimal digits of a hash, or empty
_CLASS = re.compile(r"[0-9a-f]{16}|")

#: part of a kernel's name in the short form that marks shuffled weights
_SHUFFLED = "bshuffle"


def key_shape(shape: Shape) -> Shape:
    """Return the shape as tables key it: with the default bias dtype, which is not part of a key."""
    if not shape.bias or shape.bias_dtype == shape.dtype:
        return shape
    return attrs.evolve(shape, bias_dtype="")


def kept(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    """Refuse a text that a table would not give back."""
    if value != "" and not is_kept(value):
        raise TableError(f"{attribute.name!r} must be {RULE} (got {value!r:.80})")


def _class(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    """Refuse a class that the tuner cannot have written."""
    if not _CLASS.fullmatch(value):
        raise TableError(f"{attribute.name!r} must be 16 hexadecimal digits, as the tuner writes them (got {value!r:.80})")


@attrs.frozen
class Row:
    """One row of a tuned table.

    Attributes:
        shape: with the default bias dtype; m = 0 pins one solution for every M (batch invariance).
        gfx: the architecture, "" for any.
        cu_num: compute units, multiprocessors or threads of the device, 0 for any.
        device: slug of the device's name, "" where the file has none.
        solution: what to launch.
        us: time of one call in microseconds.
        err_ratio: share of wrong elements when it was tuned.
        libver: version of the backend's library then, "" where the kernel's name includes a
            revision.
        bit_class: hash of the kernel's output bits on standard operands, as 16 hexadecimal digits,
            equal for all rows of its class; "" for a row that was tuned without
            ``--batch-invariant``.
        source, line: file and line of the row; line 0 for a row that was not read.
        extra: unknown columns, as (name, text) pairs.
    """

    shape: Shape = attrs.field(converter=key_shape)
    gfx: str = attrs.field(validator=attrs.validators.matches_re(r"[a-z0-9_.-]*"))
    cu_num: int = attrs.field(validator=attrs.validators.ge(0))
    device: str = attrs.field(validator=kept)
    solution: Solution
    us: float
    err_ratio: float = 0.0
    libver: str = attrs.field(default="", validator=kept)
    bit_class: str = attrs.field(default="", validator=_class)
    source: Path = attrs.field(default=Path(), eq=False)
    line: int = attrs.field(default=0, eq=False)
    extra: tuple[tuple[str, str], ...] = ()

    @property
    def valid(self) -> bool:
        """Tell whether the row may win: its time is a finite number above 0."""
        return 0.0 < self.us < math.inf

    @property
    def group(self) -> tuple[str, int, str, Shape]:
        """Return the key without M: rows of one group must have one bit class."""
        return self.gfx, self.cu_num, self.device, self.shape.with_m(0)

    @property
    def key(self) -> tuple[str, int, str, Shape]:
        """Return the key that `upsert` replaces: device and shape."""
        return self.gfx, self.cu_num, self.device, self.shape


def rows_of(path: Path, record: Record, op: Op, unknown: Collection[str] = ()) -> list[Row]:
    """Parse a line of a tuned file: one row, except where it names no device.

    A blank fp8 dtype means that of the line's gfx, or both kinds in a line for any device. A line
    of the short form (``M,N,K,lib,kernel_name,...``) holds for any device, with and without a bias,
    in bf16 and fp16. It holds for shuffled weights where its kernel's name contains ``bshuffle``,
    else for plain ones. Its time follows from its rate.

    Args:
        unknown: the file's unknown columns; their texts are kept.

    Raises:
        TunedGemmError, ValueError: the line lacks a value or has an impossible one.
    """
    return RowReader(path, op, unknown).rows(record)


class RowReader:
    """Reads lines of a tuned file: the parts that follow from its op are found once."""

    def __init__(self, path: Path, op: Op, unknown: Collection[str] = ()) -> None:
        own = own_names(op.columns)
        self._path, self._op, self._unknown = path, op, unknown
        self._foreign = foreign_columns(op)
        self._values, self._has_libtype = tuple(own.items()), "libtype" in own
        self._further = sorted(column for name, column in own.items() if name not in _KNOWN)

    def rows(self, record: Record) -> list[Row]:
        """Return the rows of a line; see `rows_of`."""
        op, cells = self._op, _given(record)
        (gfx, cu_num, device), shapes = _device_and_shapes(record, cells, op, self._foreign)
        solution, values = self._solution(record, cells)
        extra = (
            tuple([(column, text) for column, text in record.cells.items() if text and column in self._unknown]) if self._unknown else ()
        )
        libver, err_ratio = own_cell(cells, "libver"), _number(values, "err_ratio", 0.0)
        anywhere = not gfx and not cu_num
        return [
            Row(
                shape=shape,
                gfx=gfx,
                cu_num=cu_num,
                device=device,
                solution=solution,
                us=_number(values, "us", _time_of_rate(cells, op.flops(shape)) if anywhere else math.nan),
                err_ratio=err_ratio,
                libver=libver,
                bit_class=own_cell(cells, BIT_CLASS),
                source=self._path,
                line=record.line,
                extra=extra,
            )
            for shape in shapes
        ]

    def _solution(self, record: Record, cells: Mapping[str, str]) -> tuple[Solution, dict[str, str]]:
        """Return the solution that a line names, and the texts of its values by our names."""
        values = {name: cells[column] for name, column in self._values if column in cells}
        if (read := self._op.columns.read) is not as_they_are:
            values |= read({column: cells[column] for _, column in self._values if column in cells})
        libtype, kernel_name = values.get("libtype", ""), values.get("kernelName", "")
        if not self._has_libtype:
            libtype = own_cell(cells, "libtype") or libtype or libtype_of_kernel(kernel_name)
        if not libtype:
            raise TableError("'libtype' is empty")
        solidx = whole_number(values, "solidx", 0)
        if replacement := stand_in(libtype):
            warn_once(f"rows of libtype {libtype!r} run {':'.join(replacement)}; their solution numbers are ignored")
            (libtype, kernel_name), solidx = replacement, 0
        solution = Solution(
            libtype=canonical(libtype),
            kernel_name=kernel_name,
            split_k=whole_number(values, "splitK", 0),
            solidx=solidx,
            extra=tuple([(column, record.cells.get(column, "")) for column in self._further]) if self._further else (),
        )
        return solution, values


def record_of(row: Row, op: Op) -> Record:
    """Format a row as texts, rounded as AITER rounds: 0.1 ns, 0.01 TFLOPS, 0.01 GB/s."""
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
    own = own_names(op.columns)
    extra = {column: str(value) for column, value in row.solution.extra}
    written = op.columns.write(values | extra)
    cells = dict(row.extra) | {"gfx": row.gfx, "cu_num": str(row.cu_num), "device": row.device}
    cells |= {"libver": row.libver} | ({BIT_CLASS: row.bit_class} if row.bit_class else {})
    cells |= {"libtype": row.solution.libtype} if "libtype" not in own else {}
    cells |= shape_cells(row.shape, op, row.gfx or None)
    cells |= extra | {column: text for name, column in own.items() if (text := written.get(column, "") or written.get(name, ""))}
    return Record(cells=cells)


def shape_cells(shape: Shape, op: Op, gfx: str | None = "") -> dict[str, str]:
    """Format a shape as texts of a line, our columns blank where the line means the same without them.

    Args:
        gfx: the architecture that the line is read for; "" for the present device's, None for any.
    """
    cells = op.columns.format(shape)
    if gfx is None:
        return cells
    texts = {column: text for column, text in cells.items() if text}
    for column in op.columns.own:
        if column in texts:
            shorter = {other: text for other, text in texts.items() if other != column}
            with contextlib.suppress(TunedGemmError, ValueError):
                texts = shorter if key_shape(op.columns.parse(shorter | {"gfx": gfx})) == key_shape(shape) else texts
    return {column: texts.get(column, "") for column in cells}


def shape_of(record: Record, op: Op, gfx: str = "") -> Shape:
    """Parse the shape of a line of a tuned or untuned file; raise UserError or ValueError on a fault.

    Args:
        gfx: the architecture whose fp8 is meant; "" for the line's, else the present device's.
    """
    cells = _given(record)
    return op.columns.parse(_texts(record, cells, op, foreign_columns(op)) | {"gfx": gfx or _named_device(cells)[0]})


def _device_and_shapes(
    record: Record, cells: Mapping[str, str], op: Op, foreign: Sequence[str]
) -> tuple[tuple[str, int, str], list[Shape]]:
    """Return the device of a line of a tuned file, and its shapes: several where it names no gfx alone.

    *cells* are those of `_given`, *foreign* those of `foreign_columns`.
    """
    texts = _texts(record, cells, op, foreign)
    if "cu_num" not in cells and own_cell(cells, "gfx"):
        raise TableError("'cu_num' is empty")
    gfx, cu_num = _named_device(cells)
    device = gfx, cu_num, own_cell(cells, "device")
    free: dict[str, tuple[str, ...]] = {} if gfx else {"gfx": _ANY_GFX}
    if "gfx" not in cells and "cu_num" not in cells and "us" not in cells:  # the short form, which holds for any device
        if "bpreshuffle" in op.columns.key:
            texts.setdefault("bpreshuffle", str(_SHUFFLED in cells.get("kernelName", "")))
        free |= {column: choices for column, choices in _ANY.items() if column in op.columns.key and column not in texts}
    texts["gfx"] = gfx
    if not free:
        return device, [op.columns.parse(texts)]
    choices = itertools.product(*free.values())
    return device, list(dict.fromkeys(op.columns.parse(texts | dict(zip(free, chosen, strict=True))) for chosen in choices))


def _given(record: Record) -> dict[str, str]:
    return {column: text for column, text in record.cells.items() if text not in MISSING}


def _texts(record: Record, cells: Mapping[str, str], op: Op, foreign: Sequence[str]) -> dict[str, str]:
    """Return the texts of a line's shape by column; raise TableError for a line of another kind or op."""
    first = op.columns.key[0]
    if len(record.raw) > LONGEST:
        raise TableError(f"a line may have at most {LONGEST} characters (got {len(record.raw)})")
    if record.raw:
        raise TableError(f"not a CSV line, for an unclosed quote or a merge marker (got {record.raw[:60]!r}); fix or delete it")
    if cells.get(first) == first:
        raise TableError("repeats the header; split the file if several were concatenated")
    if not _HEADS.isdisjoint(cells.values()) and not any(cells.get(column, "").isdecimal() for column in sizes(op)):
        raise TableError("a header of another table; split the file if several were concatenated")
    if record.surplus:
        raise TableError(f"more fields than columns (got {', '.join(record.surplus)[:60]!r} beyond the last)")
    if cells.get(UNUSED[0]) == UNUSED[1]:
        raise TableError(f"tagged {UNUSED[1]!r}: never looked up, as in AITER")
    if not cells.keys().isdisjoint(foreign) and (stray := stray_columns(record, op)):
        having = [other.name for other in ops().values() if {*stray} <= {*other.columns.key} and {*sizes(other)} <= {*record.cells}]
        others = f" ({' or '.join(having)})" if having else ""
        raise TableError(f"a row of another op{others}; {op.name} has no {', '.join(map(repr, stray))}")
    texts = {column: cells[column] for column in op.columns.key if column in cells}
    return texts | {column: cells[column] for column in op.columns.own if cells.get(column, "0") not in FILLERS}


def stray_columns(record: Record, op: Op) -> list[str]:
    """Return the columns of other ops that a line fills, which makes it a row of theirs."""
    return [column for column in foreign_columns(op) if own_cell(record.cells, column)]


def key_of(record: Record, op: Op) -> tuple[str, int, str, Shape] | None:
    """Return `Row.key` of a record; None for one that is not understood, or that is several rows."""
    try:
        device, shapes = _device_and_shapes(record, _given(record), op, foreign_columns(op))
        return (*device, key_shape(shapes[0])) if len(shapes) == 1 else None
    except (TunedGemmError, ValueError):
        return None


def sort_key(record: Record, op: Op) -> list[tuple[int, float, str]]:
    """Return the sort key of a record: gfx, cu_num, then the op's key with N before M.

    Numbers sort by value; unreadable lines come last.
    """
    key = list(op.columns.key)
    if "M" in key and "N" in key:
        key.remove("M")
        key.insert(key.index("N") + 1, "M")
    if record.raw:
        return [(2, 0.0, "")]
    texts = [own_cell(record.cells, "gfx"), *(record.cells.get(column, "") for column in ("cu_num", *key, "device"))]
    return [_ordered(text) for text in texts]


def reason(error: Exception) -> str:
    """Return an exception's message; attrs' validators put theirs first and objects after it."""
    return str(error.args[0]) if error.args else type(error).__name__


def blank(record: Record) -> bool:
    """Tell whether a line is a comment or empty: all its fields are empty or spell a missing value."""
    return record.is_comment or (not record.raw and not record.surplus and MISSING.issuperset(record.cells.values()))


def named_device(record: Record) -> tuple[str, int]:
    """Return gfx and cu_num of a line, "" and 0 for any; in AITER's old files gfx follows from cu_num."""
    return _named_device(_given(record))


def _named_device(cells: Mapping[str, str]) -> tuple[str, int]:
    cu_num = whole_number(cells, "cu_num", 0)
    return own_cell(cells, "gfx").lower() or _GFX_OF_CUS.get(cu_num, ""), cu_num


def own_cell(cells: Mapping[str, str], column: str) -> str:
    """Return the text of a column that AITER's merge may have filled with 0; "" for a missing value."""
    text = cells.get(column, "")
    return "" if text in MISSING or text in FILLERS else text


def _number(cells: Mapping[str, str], column: str, default: float) -> float:
    text = cells.get(column, "")
    try:
        return default if text in MISSING else float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise TableError(f"{column!r} must be a number (got {text[:40]!r})") from None


def _time_of_rate(cells: Mapping[str, str], flops: int) -> float:
    """Return the microseconds of a call from the TFLOP/s that the short form gives instead."""
    rate = _number(cells, "tflops", 0.0)
    return flops / rate / 1e6 if rate > 0 else math.nan


def whole_number(cells: Mapping[str, str], column: str, default: int) -> int:
    """Return the whole number of a column, *default* where absent; raise TableError for another text."""
    if (text := cells.get(column, "")).isdecimal() and len(text) <= _EXACT:
        return int(text)
    number = _number(cells, column, default)
    if not math.isfinite(number) or number != int(number):
        raise TableError(f"{column!r} must be a whole number (got {cells[column][:40]!r})")
    return int(number)


def _ordered(text: str) -> tuple[int, float, str]:
    try:
        number = float(text)
    except ValueError:
        return 1, 0.0, text
    return (1, 0.0, text) if math.isnan(number) else (0, number, "")
