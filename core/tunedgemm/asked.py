"""From what a user types to an op and a shape of it: columns of a file, sizes, and ``name=value``; torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from tunedgemm.csvfile import infer_op
from tunedgemm.errors import TableError, UserError
from tunedgemm.ops import DEFAULT_OP, op_named
from tunedgemm.ops.op import Op
from tunedgemm.row import shape_of
from tunedgemm.shape import Shape
from tunedgemm.sheet import read_sheet


def op_of_file(path: Path) -> Op:
    """The op that a tuned or untuned file is of, by its columns and its name; see `tunedgemm.csvfile.infer_op`.

    One that cannot be read counts as of the default op: who reads it says what is wrong.

    Raises:
        UserError: the columns fit several ops that are not told apart.
    """
    try:
        return infer_op([path])
    except TableError:
        return op_named(DEFAULT_OP)


def shape_of_texts(op: Op, sizes: Iterable[str], said: Mapping[str, str]) -> Shape:
    """A shape from the texts of its table's columns.

    Args:
        op: the op.
        sizes: numbers for the first columns of its key that are not in *said*, in order.
        said: further columns, of its key or ours.

    Raises:
        UserError: a column that the op does not have, or what the op's own parser finds wrong or missing.
    """
    known = (*op.columns.key, *op.columns.own)
    for column in said:
        if column not in known:
            raise UserError(f"{op.name} has no column {column!r}; its shapes are told by {', '.join(known)}")
    free = [column for column in op.columns.key if column not in said]
    given = list(sizes)
    if len(given) > len(free):
        raise UserError(f"{len(given)} sizes for {op.name}, whose key is {', '.join(op.columns.key)}")
    texts = dict(zip(free, given, strict=False)) | dict(said)
    try:
        return op.columns.parse(texts)
    except UserError as error:
        taken = f"the sizes were taken for {', '.join(free[: len(given)])}; " if given else ""
        whose = "" if str(error).startswith(f"{op.name}: ") else f"{op.name}: "
        raise UserError(f"{whose}{error}; {taken}say more with --set COLUMN=TEXT of {', '.join(known)}") from None


def shape_of_line(op: Op, path: Path, line: int) -> Shape:
    """The shape of one line of a tuned or untuned file, the header being line 1.

    Raises:
        UserError: there is no such file or line, or it is no shape of this op.
    """
    records = {record.line: record for record in read_sheet(path).records}
    if line not in records:
        raise UserError(f"{path} has no shape in line {line}; its lines are {min(records, default=0)} to {max(records, default=0)}")
    return shape_of(records[line], op)
