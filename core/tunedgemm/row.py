"""Row: one line of a tuned table, and its way from and to the texts of a file; torch-free."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from tunedgemm.errors import TableError, TunedGemmError
from tunedgemm.libtypes import canonical, libtype_of_kernel
from tunedgemm.shape import Shape
from tunedgemm.sheet import Record
from tunedgemm.solution import Solution

if TYPE_CHECKING:
    from tunedgemm.ops.op import Op

#: other names of a column in AITER's and gradlib's files
SYNONYMS = {
    "soltimes": "us", "kernelId": "solidx", "errRatio": "err_ratio",
    "lib": "libtype", "kernel_name": "kernelName", "bandwidth_gb_s": "bw",
}  # fmt: skip

#: columns of `Columns.values` with a meaning here; further ones belong to the op and go to `Solution.extra`
_KNOWN = ("libtype", "solidx", "splitK", "us", "kernelName", "err_ratio", "tflops", "bw")

#: how pandas and others write that there is no value
_NOTHING = ("", "nan", "na", "n/a", "<na>", "none", "null")

#: CU counts of AITER's legacy files, which have no gfx column (facts of its chip_info)
_GFX_OF_CUS = {256: "gfx950", 80: "gfx942", 304: "gfx942"}


def key_shape(shape: Shape) -> Shape:
    """The shape as tables know it: with the default bias dtype, which is no part of a table's key."""
    if not shape.bias or shape.bias_dtype == shape.dtype:
        return shape
    return attrs.evolve(shape, bias_dtype="")


def _one_line(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    if not isinstance(value, str) or "\n" in value or "\r" in value:
        raise TableError(f"{attribute.name!r} must be text on one line (got {value!r})")


@attrs.frozen
class Row:
    """One row of a tuned table.

    Attributes:
        shape: with the default bias dtype; m = 0 pins one solution for every M (batch invariance).
        gfx: the architecture, "" for any.
        cu_num: compute units, multiprocessors or threads of the device, 0 for any.
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


def untuned_of(record: Record, op: Op) -> tuple[Shape, int]:
    """The shape and the count of one line of an untuned file; a line without a count stands for one call.

    Raises:
        UserError: the line is no shape that can be tuned.
    """
    shape, count = shape_of(record, op), _whole(record.cells, "count", 1)
    if shape.m < 1:
        raise TableError("'M' must be at least 1 (got 0): there is nothing to tune in an empty batch")
    if count < 0:
        raise TableError(f"'count' must not be negative (got {count})")
    return shape, count


def row_of(path: Path, record: Record, op: Op, unknown: tuple[str, ...]) -> Row:
    """A line of a tuned file as a row.

    Args:
        unknown: the file's columns that mean nothing here; what they say is kept.

    Raises:
        TunedGemmError, ValueError: the line lacks something or says something impossible.
    """
    cells, own = record.cells, own_names(op)
    shape = shape_of(record, op)
    gfx, cu_num, device = _place(record)
    kernel_name = _get(cells, "kernelName")
    libtype = _get(cells, "libtype")
    if not libtype and "libtype" not in own:
        libtype = libtype_of_kernel(kernel_name)
    if not libtype:
        raise TableError("'libtype' is empty")
    solution = Solution(
        libtype=canonical(libtype),
        kernel_name=kernel_name,
        split_k=_whole(cells, "splitK", 0),
        solidx=_whole(cells, own.get("solidx", "solidx"), 0),
        extra=tuple(sorted((column, _get(cells, column)) for name, column in own.items() if name not in _KNOWN)),
    )
    return Row(
        shape=shape,
        gfx=gfx,
        cu_num=cu_num,
        device=device,
        solution=solution,
        us=_number(cells, own.get("us", "us"), math.nan if gfx or cu_num else _time_of_rate(cells, op.flops(shape))),
        err_ratio=_number(cells, own.get("err_ratio", "err_ratio"), 0.0),
        libver=_ours(cells, "libver"),
        source=path,
        line=record.line,
        extra=tuple((column, text) for column in unknown if (text := cells.get(column, ""))),
    )


def record_of(row: Row, op: Op) -> Record:
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
    own = {"libtype": "libtype", **own_names(op)}
    cells = dict(row.extra) | {"gfx": row.gfx, "cu_num": str(row.cu_num), "device": row.device, "libver": row.libver}
    cells |= op.columns.format(row.shape)
    cells |= {column: values[name] for name, column in own.items() if name in values}
    cells |= {column: str(value) for column, value in row.solution.extra}
    return Record(cells=cells)


def shape_of(record: Record, op: Op) -> Shape:
    """The shape of a line of a tuned or untuned file; raises UserError or ValueError for what is none."""
    if record.raw:
        raise TableError(f"is no line of a CSV file (unclosed quote, or left by a version control merge): {record.raw[:60]!r}")
    if record.surplus:
        raise TableError(f"has fields beyond the last column: {', '.join(record.surplus)[:60]!r}")
    texts = {column: text for column in op.columns.key if (text := _get(record.cells, column))}
    texts |= {column: text for column in ("layout", "scale") if (text := _ours(record.cells, column))}
    return op.columns.parse(texts)


def key_of(record: Record, op: Op) -> tuple[str, int, str, Shape] | None:
    """`Row.key` of a record; None for one that is not understood."""
    try:
        return (*_place(record), key_shape(shape_of(record, op)))
    except (TunedGemmError, ValueError):
        return None


def sort_key(record: Record, op: Op) -> list[tuple[int, float, str]]:
    """gfx, cu_num, then the op's key with N before M, numbers by value; lines that are not understood come last."""
    key = list(op.columns.key)
    if "M" in key and "N" in key:
        key.remove("M")
        key.insert(key.index("N") + 1, "M")
    if record.raw:
        return [(2, 0.0, "")]
    texts = [_ours(record.cells, "gfx"), *(record.cells.get(column, "") for column in ("cu_num", *key, "device"))]
    return [_ordered(text) for text in texts]


@functools.cache
def own_names(op: Op) -> Mapping[str, str]:
    """Our name of a value column -> the op's: ``solidx`` -> ``kernelId`` where AITER calls it so."""
    return {SYNONYMS.get(column, column): column for column in op.columns.values}


def reason(error: Exception) -> str:
    """What an exception says; validators of attrs put their message first and objects after it."""
    return str(error.args[0]) if error.args else type(error).__name__


def blank(record: Record) -> bool:
    """Whether a line says nothing: all its fields are empty or written as absent."""
    return not record.raw and not record.surplus and not any(_present(text) for text in record.cells.values())


def _place(record: Record) -> tuple[str, int, str]:
    """gfx, cu_num and device slug; a missing gfx is derived from the CU count as AITER's legacy files ask for.

    A line with neither is of the short form (M,N,K,lib,kernel_name,tflops ...), which names no device and holds for any.
    """
    if not _get(record.cells, "cu_num") and _ours(record.cells, "gfx"):
        raise TableError("'cu_num' is empty")
    cu_num = _whole(record.cells, "cu_num", 0)
    return _ours(record.cells, "gfx").lower() or _GFX_OF_CUS.get(cu_num, ""), cu_num, _ours(record.cells, "device")


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


def _time_of_rate(cells: Mapping[str, str], flops: int) -> float:
    """Microseconds of a call from the TFLOP/s that the short form gives in their stead."""
    rate = _number(cells, "tflops", 0.0)
    return flops / rate / 1e6 if rate > 0 else math.nan


def _whole(cells: Mapping[str, str], column: str, default: int) -> int:
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
