"""Columns: infer the op and the meaning of columns from a file's header. Torch-free."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from tunedgemm.ops import ops

if TYPE_CHECKING:
    from tunedgemm.ops.op import Columns, Op

#: Names of columns in AITER's and gradlib's files -> our names.
SYNONYMS = {
    "soltimes": "us", "kernelId": "solidx", "errRatio": "err_ratio",
    "lib": "libtype", "kernel_name": "kernelName", "bandwidth_gb_s": "bw",
}  # fmt: skip

#: Further columns of an untuned file: eager calls, calls recorded into graphs, layer names.
UNTUNED_EXTRA = ("count", "graph", "layer")

#: AITER's device columns, which a list of shapes may have, too; ``--all`` compares them.
DEVICE = ("gfx", "cu_num")

#: The column of `Row.bit_class`, which only files with class rows have.
BIT_CLASS = "bit_class"

#: Key columns that AITER's older files lack; the op's parser has defaults.
_DEFAULTED = ("bias", "dtype", "outdtype", "scaleAB", "bpreshuffle", "x_dtype")

#: Columns of tuned tables only.
_MEASURED = ("us", "kernelName", "kernelName1", "soltimes", "tflops")


@functools.cache
def own_names(columns: Columns) -> Mapping[str, str]:
    """Map our names of value columns to the op's, such as ``solidx`` to ``kernelId``."""
    return {SYNONYMS.get(column, column): column for column in columns.values}


def synonyms(op: Op, columns: Sequence[str]) -> dict[str, str]:
    """Map columns of a file to the op's names, where they differ.

    A list of shapes of an op without a dtype in its key may use the column ``q_dtype_w``.
    """
    own = own_names(op.columns)
    named = {column: own.get(SYNONYMS.get(column, column), SYNONYMS.get(column, column)) for column in columns}
    named |= {"q_dtype_w": "dtype"} if "dtype" in op.columns.own and not is_tuned(columns) else {}
    taken = (*op.columns.key, *op.columns.values, *appended(op))
    return {old: new for old, new in named.items() if old != new and new in taken and new not in columns}


def foreign_columns(op: Op) -> tuple[str, ...]:
    """Return the key columns of other ops that this op lacks, which mark rows of those ops."""
    return _foreign(op.columns, tuple([other.columns.key for other in ops().values()]))


def columns_of_others(op: Op) -> tuple[str, ...]:
    """Return the columns of other ops that this op lacks, AITER's and ours."""
    return _foreign(op.columns, tuple([(*other.columns.key, *other.columns.own) for other in ops().values()]))


@functools.cache
def _foreign(columns: Columns, keys: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    own = {*columns.key, *columns.values, *columns.own}
    return tuple(dict.fromkeys(column for key in keys for column in key if column not in own))


def look_alikes(columns: Sequence[str]) -> list[str]:
    """Return the names of the ops whose tuned or untuned files have these columns.

    A file with AITER's columns in AITER's order belongs to the ops with exactly these; another file
    to all ops that could read it.
    """
    readers = [op for op in ops().values() if fits(columns, op)]
    return [op.name for op in readers if is_of_aiter(columns, op)] or [op.name for op in readers]


def fits(columns: Sequence[str], op: Op) -> bool:
    """Check whether an op could read a file with these columns, ignoring unknown ones."""
    strange = set(columns) - {*synonyms(op, columns)}
    if not set(sizes(op)) <= set(columns) or set(foreign_columns(op)) & strange:
        return False
    in_file = {SYNONYMS.get(column, column) for column in columns} | ({"us"} if "tflops" in columns else set())
    return not is_tuned(columns) or {SYNONYMS.get(column, column) for column in measures(op)} <= in_file


def is_tuned(columns: Iterable[str]) -> bool:
    """Check whether columns are those of a tuned table, not of a list of shapes."""
    return bool(set(_MEASURED) & set(columns))


def is_of_aiter(columns: Sequence[str], op: Op) -> bool:
    """Check whether the columns begin with AITER's, in AITER's order."""
    if not is_tuned(columns):
        return [column for column in columns if column not in DEVICE] == list(op.columns.key)
    aiters = ["cu_num", *op.columns.key, *op.columns.values]
    return [column for column in columns if column != "gfx"][: len(aiters)] == aiters


def other_ops_hint(op: Op, columns: Sequence[str]) -> str:
    """Return the end of a message about a file that may belong to other ops; "" if not."""
    others = [ops()[name] for name in look_alikes(columns) if name != op.name]
    if not others or op.name in look_alikes(columns):
        return ""
    names = " or ".join(f"{other.name} ({other.columns.variable})" for other in others)
    return f"; these are the columns of {names}"


def sizes(op: Op) -> list[str]:
    """Return the key columns that every file of an op must have."""
    return [column for column in op.columns.key if column not in _DEFAULTED]


def measures(op: Op) -> list[str]:
    """Return the value columns that every tuned file of an op must have."""
    own = own_names(op.columns)
    return [own[name] for name in ("libtype", "us") if name in own]


def in_order(op: Op, columns: Iterable[str]) -> list[str]:
    """Sort columns: AITER's in AITER's order, ours, then the rest of *columns*.

    All of ours are listed, but `BIT_CLASS` only if it is in *columns*.
    """
    given = tuple(columns)
    classes = (BIT_CLASS,) if BIT_CLASS in given else ()
    return list(dict.fromkeys(("gfx", "cu_num", *op.columns.key, *op.columns.values, *appended(op), *classes, *given)))


def unknown_columns(op: Op, columns: Iterable[str]) -> frozenset[str]:
    """Return the columns of a file that are unknown."""
    return frozenset(columns) - {*in_order(op, (BIT_CLASS,))}


def appended(op: Op) -> tuple[str, ...]:
    """Return our columns after AITER's, in which "" and AITER's filler 0 mean absent."""
    libtype = () if "libtype" in op.columns.values else ("libtype",)
    return (*libtype, "device", *op.columns.own, "libver")
