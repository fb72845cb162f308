"""Columns: which op a file belongs to, and which column is which, from its header. Torch-free."""

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

#: columns of an untuned file beyond its op's columns: eager calls, calls recorded into graphs,
#: layer names
UNTUNED_EXTRA = ("count", "graph", "layer")

#: columns of AITER's device, which a list of shapes may have, too: ``--all`` compares them
DEVICE = ("gfx", "cu_num")

#: key columns that AITER's older files lack; the op's parser has their defaults
_DEFAULTED = ("bias", "dtype", "outdtype", "scaleAB", "bpreshuffle", "x_dtype")

#: columns that no list of shapes has
_MEASURED = ("us", "kernelName", "kernelName1", "soltimes", "tflops")


@functools.cache
def own_names(columns: Columns) -> Mapping[str, str]:
    """Map our names of value columns to the op's: ``solidx`` -> ``kernelId`` where AITER calls it so."""
    return {SYNONYMS.get(column, column): column for column in columns.values}


def synonyms(op: Op, columns: Sequence[str]) -> dict[str, str]:
    """Map columns of a file to the op's names for them, where it does not have those already.

    A list of a family whose key has no dtype may name it as the others do, ``q_dtype_w``.
    """
    own = own_names(op.columns)
    named = {column: own.get(SYNONYMS.get(column, column), SYNONYMS.get(column, column)) for column in columns}
    named |= {"q_dtype_w": "dtype"} if "dtype" in op.columns.own and not is_tuned(columns) else {}
    taken = (*op.columns.key, *op.columns.values, *appended(op))
    return {old: new for old, new in named.items() if old != new and new in taken and new not in columns}


def foreign_columns(op: Op) -> tuple[str, ...]:
    """Return the columns that mark a row of another op: other ops' key columns that this one lacks."""
    return _foreign(op.columns, tuple([other.columns.key for other in ops().values()]))


@functools.cache
def _foreign(columns: Columns, keys: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    own = {*columns.key, *columns.values, *columns.own}
    return tuple(dict.fromkeys(column for key in keys for column in key if column not in own))


def look_alikes(columns: Sequence[str]) -> list[str]:
    """Return the ops whose tuned or untuned files have these columns; none where no op's do.

    A file with AITER's columns in AITER's order belongs to the ops that have exactly these; any
    other file to all ops that could read it.
    """
    readers = [op for op in ops().values() if fits(columns, op)]
    return [op.name for op in readers if is_of_aiter(columns, op)] or [op.name for op in readers]


def fits(columns: Sequence[str], op: Op) -> bool:
    """Tell whether an op could read a file with these columns, apart from unknown ones."""
    strange = set(columns) - {*synonyms(op, columns)}
    if not set(sizes(op)) <= set(columns) or set(foreign_columns(op)) & strange:
        return False
    in_file = {SYNONYMS.get(column, column) for column in columns} | ({"us"} if "tflops" in columns else set())
    return not is_tuned(columns) or {SYNONYMS.get(column, column) for column in measures(op)} <= in_file


def is_tuned(columns: Iterable[str]) -> bool:
    """Tell whether these are columns of a tuned table rather than of a list of shapes."""
    return bool(set(_MEASURED) & set(columns))


def is_of_aiter(columns: Sequence[str], op: Op) -> bool:
    """Tell whether a file has AITER's columns in AITER's order, whatever follows them."""
    if not is_tuned(columns):
        return [column for column in columns if column not in DEVICE] == list(op.columns.key)
    aiters = ["cu_num", *op.columns.key, *op.columns.values]
    return [column for column in columns if column != "gfx"][: len(aiters)] == aiters


def other_ops_hint(op: Op, columns: Sequence[str]) -> str:
    """Return the end of a message about a file that looks like other ops'."""
    others = [ops()[name] for name in look_alikes(columns) if name != op.name]
    if not others or op.name in look_alikes(columns):
        return ""
    names = " or ".join(f"{other.name} ({other.columns.variable})" for other in others)
    return f"; these are the columns of {names}"


def sizes(op: Op) -> list[str]:
    """Return the columns of an op's key that every file has."""
    return [column for column in op.columns.key if column not in _DEFAULTED]


def measures(op: Op) -> list[str]:
    """Return the value columns that every row of an op needs."""
    own = own_names(op.columns)
    return [own[name] for name in ("libtype", "us") if name in own]


def in_order(op: Op, columns: Iterable[str]) -> list[str]:
    """Order columns: AITER's in AITER's order, ours, then the rest of *columns*."""
    return list(dict.fromkeys(("gfx", "cu_num", *op.columns.key, *op.columns.values, *appended(op), *columns)))


def unknown_columns(op: Op, columns: Iterable[str]) -> frozenset[str]:
    """Return the columns of a file that are unknown."""
    return frozenset(columns) - {*in_order(op, ())}


def appended(op: Op) -> tuple[str, ...]:
    """Return our columns, which follow AITER's; "" and AITER's filler 0 mean absent in them."""
    libtype = () if "libtype" in op.columns.values else ("libtype",)
    return (*libtype, "device", *op.columns.own, "libver")
