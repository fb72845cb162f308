"""From what a user types to an op and a shape of it: columns of a file, sizes, and ``name=value``; torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import attrs

from tunedgemm.dtype import dtype_bits
from tunedgemm.errors import TableError, UserError
from tunedgemm.ops import DEFAULT_OP, op_named
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.table.csvfile import Untuned, infer_op, read_untuned
from tunedgemm.table.folders import untuned_path
from tunedgemm.table.row import shape_of
from tunedgemm.table.sheet import present, read_sheet


def op_of_file(path: Path) -> Op:
    """The op that a tuned or untuned file is of, by its columns and its name; see `tunedgemm.table.csvfile.infer_op`.

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
        UserError: a column that the op does not have, or what the op's own parser finds wrong or
            missing.
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


@attrs.frozen
class Changes:
    """What is to be made of every shape: AITER's ``--indtype``, ``--outdtype`` and ``--all_bias``.

    Attributes:
        indtype: dtype of the activations, "" for as it is.
        outdtype: dtype of the output; "" follows `indtype` where that is said, but 8 bits come out
            in bf16.
        all_bias: each shape with a bias and without.
    """

    indtype: str = ""
    outdtype: str = ""
    all_bias: bool = False


def changed(op: Op, rows: Iterable[Untuned], changes: Changes) -> tuple[Untuned, ...]:
    """Shapes as they are changed, in order; of what becomes one shape the counts are added.

    Raises:
        UserError: the op has no such column, or cannot have the dtype.
    """
    said = _said(op, changes)
    folded: dict[Shape, Untuned] = {}
    for row in rows:
        cells = {column: text for column, text in op.columns.format(row.shape).items() if text} | said
        for bias in ({"bias": "False"}, {"bias": "True"}) if changes.all_bias else ({},):
            try:
                shape = op.columns.parse(cells | bias)
            except UserError as error:
                told = ", ".join(f"{column}={text}" for column, text in said.items())
                raise UserError(f"{op.name} cannot have {told}: {error}; --op picks the op that is meant") from None
            folded[shape] = folded[shape].joined(row) if shape in folded else attrs.evolve(row, shape=shape)
    return tuple(folded.values())


def dtype_column(op: Op) -> str:
    """The column that tells in which dtype an op multiplies; "" where none does."""
    return next((column for column in ("dtype", "q_dtype_w", "x_dtype") if column in (*op.columns.key, *op.columns.own)), "")


def _said(op: Op, changes: Changes) -> dict[str, str]:
    """The columns of an op that are changed, but for the bias, and their texts."""
    columns, taken = (*op.columns.key, *op.columns.own), dtype_column(op)
    asked = {"--indtype": (changes.indtype, taken), "--outdtype": (changes.outdtype, "outdtype"), "--all_bias": (changes.all_bias, "bias")}
    for flag, (value, column) in asked.items():
        if value and column not in columns:
            told = ", ".join(columns)
            raise UserError(f"{flag}: the shapes of {op.name} have no such column, they are told by {told}; --op picks another op")
    said = {taken: changes.indtype} if changes.indtype else {}
    following = changes.indtype if not changes.indtype or dtype_bits(changes.indtype) > 8 else "bf16"
    outdtype = changes.outdtype or following
    return said | ({"outdtype": outdtype} if outdtype and "outdtype" in columns else {})


def list_paths(names: Iterable[str], target: str) -> dict[str, Path]:
    """Where the lists of shapes of some ops are to be written, by op: in a folder that there is, or that ends in ``/``, each under
    AITER's name for it, else to the file itself.

    Raises:
        UserError: one file for several ops, or a file that is something else, or captured, would be
            replaced.
    """
    path, ops = Path(target).expanduser(), [op_named(name) for name in names]
    folder = target.endswith("/") or path.is_dir()
    if len(ops) > 1 and not folder:
        told = ", ".join(op.name for op in ops)
        raise UserError(f"{target}: the shapes are of several ops ({told}): name a folder, as {target}/, or one op with --op")
    found = {op.name: path / op.columns.untuned_file if folder else path for op in ops}
    for op in ops:
        _check_replaceable(found[op.name], op)
    return found


def _check_replaceable(path: Path, op: Op) -> None:
    """Raise UserError for a file that is there and would be missed: captured shapes, or what is no list of this op's shapes."""
    if not present(path):
        return
    if not path.is_file():
        raise UserError(f"{path}: is no regular file; name a file, or a folder as {path}/")
    if path.resolve() == untuned_path(op).resolve():
        raise UserError(f"{path}: holds the captured shapes of {op.name}, which would be lost; name another file or folder")
    try:
        read_untuned(path, op)
    except TableError as error:
        raise UserError(f"{path}: is there and would be lost; name another file or folder ({error})") from None
