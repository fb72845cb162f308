"""Columns: what the line of column names of a tuned or untuned file tells: whose file it is, and which column is what. Torch-free."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from tunedgemm.ops import ops

if TYPE_CHECKING:
    from tunedgemm.ops.op import Columns, Op

#: other names of a column in AITER's and gradlib's files
SYNONYMS = {
    "soltimes": "us", "kernelId": "solidx", "errRatio": "err_ratio",
    "lib": "libtype", "kernel_name": "kernelName", "bandwidth_gb_s": "bw",
}  # fmt: skip

#: columns of an untuned file beyond its op's key and its columns of ours: how often, recorded into graphs how often, and by what
UNTUNED_EXTRA = ("count", "graph", "layer")

#: key columns that a file may lack, as AITER's older files do; the op's parser knows their defaults
_DEFAULTED = ("bias", "dtype", "outdtype", "scaleAB", "bpreshuffle", "x_dtype")

#: what nobody's list of shapes has
_MEASURED = ("us", "kernelName", "kernelName1", "soltimes", "tflops")


@functools.cache
def own_names(columns: Columns) -> Mapping[str, str]:
    """Our name of a value column -> the op's: ``solidx`` -> ``kernelId`` where AITER calls it so."""
    return {SYNONYMS.get(column, column): column for column in columns.values}


def foreign_columns(op: Op) -> tuple[str, ...]:
    """Columns that tell a row of another op: those of the others' keys that this one does not have."""
    return _foreign(op.columns, tuple(other.columns.key for other in ops().values()))


@functools.cache
def _foreign(columns: Columns, keys: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    known = {*columns.key, *columns.values, *columns.own}
    return tuple(dict.fromkeys(column for key in keys for column in key if column not in known))


def look_alikes(columns: Sequence[str]) -> list[str]:
    """The ops whose tuned or untuned files have these columns; none where no op's do.

    A file with AITER's columns in AITER's order is of the ops that have exactly these; else all
    that could read it are.
    """
    fits = [op for op in ops().values() if set(sizes(op)) <= set(columns) and not set(foreign_columns(op)) & set(columns)]
    if is_tuned(columns):
        said = {SYNONYMS.get(column, column) for column in columns} | ({"us"} if "tflops" in columns else set())
        fits = [op for op in fits if {SYNONYMS.get(column, column) for column in measures(op)} <= said]
    return [op.name for op in fits if is_of_aiter(columns, op)] or [op.name for op in fits]


def is_tuned(columns: Iterable[str]) -> bool:
    """Whether these are columns of a tuned table rather than of a list of shapes."""
    return bool(set(_MEASURED) & set(columns))


def is_of_aiter(columns: Sequence[str], op: Op) -> bool:
    """Whether a file has AITER's columns in AITER's order, whatever follows them."""
    if not is_tuned(columns):
        return list(columns) == list(op.columns.key)
    aiters = ["cu_num", *op.columns.key, *op.columns.values]
    return [column for column in columns if column != "gfx"][: len(aiters)] == aiters


def told_alike(op: Op, columns: Sequence[str]) -> str:
    """The end of a message about a file that looks like other ops'."""
    others = [ops()[name] for name in look_alikes(columns) if name != op.name]
    if not others or op.name in look_alikes(columns):
        return ""
    told = " or ".join(f"{other.name} ({other.columns.variable})" for other in others)
    return f"; these are the columns of {told}"


def sizes(op: Op) -> list[str]:
    """The columns of an op's key that every file has."""
    return [column for column in op.columns.key if column not in _DEFAULTED]


def measures(op: Op) -> list[str]:
    """The value columns without which no row of an op says anything."""
    own = own_names(op.columns)
    return [own[name] for name in ("libtype", "us") if name in own]


def in_order(op: Op, columns: Iterable[str]) -> list[str]:
    """AITER's columns in AITER's order, ours, then those of *columns* that are neither."""
    return list(dict.fromkeys(("gfx", "cu_num", *op.columns.key, *op.columns.values, *appended(op), *columns)))


def unknown_columns(op: Op, columns: Iterable[str]) -> tuple[str, ...]:
    """Those of a file's columns that mean nothing here."""
    known = set(in_order(op, ()))
    return tuple(column for column in columns if column not in known)


def appended(op: Op) -> tuple[str, ...]:
    """Our columns, after AITER's; "" and AITER's filler 0 mean absent in them."""
    libtype = () if "libtype" in op.columns.values else ("libtype",)
    return (*libtype, "device", *op.columns.own, "libver")
