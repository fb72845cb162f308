"""Parse ops and shapes from user input: files, sizes and ``name=value``. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import attrs

from tunedgemm.device import Device
from tunedgemm.dtype import dtype_bits
from tunedgemm.errors import TableError, UserError
from tunedgemm.ops import DEFAULT_OP, op_named
from tunedgemm.ops.op import Op
from tunedgemm.process.paths import expanded
from tunedgemm.shape import Shape
from tunedgemm.table.columns import is_tuned
from tunedgemm.table.csvfile import infer_op
from tunedgemm.table.folders import untuned_path
from tunedgemm.table.row import blank, named_device, shape_of
from tunedgemm.table.sheet import present, read_sheet
from tunedgemm.table.untuned import Untuned, read_untuned


def op_of_file(path: Path) -> Op:
    """Return the op of a tuned or untuned file; see `tunedgemm.table.csvfile.infer_op`.

    An unreadable file counts as the default op's: its reader reports the fault.

    Raises:
        UserError: the columns fit several ops and neither they nor the name decide.
    """
    try:
        return infer_op([path])
    except TableError:
        return op_named(DEFAULT_OP)


def is_tuned_file(path: Path) -> bool:
    """Tell whether a file has the columns of a tuned table."""
    return is_tuned(read_sheet(path, whole=False).columns)


def stated_cells(texts: Iterable[str]) -> dict[str, str]:
    """Parse the texts of ``--set COLUMN=TEXT``; raise UserError for other texts and a column twice."""
    cells: dict[str, str] = {}
    for text in texts:
        column, equals, value = (part.strip() for part in text.partition("="))
        if not (column and equals):
            raise UserError(f"--set: must be COLUMN=TEXT, such as dtype=fp16 (got {text!r})")
        if column in cells:
            raise UserError(f"--set: {column} is given twice; give it one value")
        cells[column] = value
    return cells


def shape_of_texts(op: Op, sizes: Iterable[str], cells: Mapping[str, str], gfx: str = "") -> Shape:
    """Parse a shape from the texts of its table's columns.

    Args:
        op: the op.
        sizes: numbers for the first columns of its key that are not in *cells*, in order.
        cells: further columns, of its key or ours.
        gfx: the architecture whose fp8 is meant; "" for the present device's.

    Raises:
        UserError: a column that the op does not have, or a value that its parser rejects or misses.
    """
    columns = (*op.columns.key, *op.columns.own)
    for column in cells:
        if column not in columns:
            raise UserError(f"{op.name} has no column {column!r}; use {', '.join(columns)}")
    free = [column for column in op.columns.key if column not in cells]
    numbers = list(sizes)
    if len(numbers) > len(free):
        raise UserError(f"too many sizes for {op.name} (got {len(numbers)}); its key is {', '.join(op.columns.key)}")
    texts = dict(zip(free, numbers, strict=False)) | dict(cells) | {"gfx": gfx}
    try:
        return op.columns.parse(texts)
    except UserError as error:
        taken = f"the sizes were taken for {', '.join(free[: len(numbers)])}; " if numbers else ""
        whose = "" if str(error).startswith(f"{op.name}: ") else f"{op.name}: "
        raise UserError(f"{whose}{error}; {taken}set others with --set COLUMN=TEXT, of {', '.join(columns)}") from None


def shape_of_line(op: Op, path: Path, line: int, gfx: str = "") -> tuple[Shape, Device | None]:
    """Parse the shape of one line of an untuned file, and its device if it names one.

    The header is line 1.

    Args:
        gfx: architecture of a line that names none; "" for the present device's.

    Raises:
        UserError: the file or line does not exist, or the line is not a shape of this op.
    """
    records = {record.line: record for record in read_sheet(path).records if not blank(record)}
    if line not in records:
        raise UserError(f"{path}: no shape in line {line}; use a line from {min(records, default=0)} to {max(records, default=0)}")
    named_gfx, units = named_device(records[line])
    return shape_of(records[line], op, named_gfx or gfx), Device(named_gfx, units) if named_gfx and units else None


@attrs.frozen
class ShapeOverrides:
    """Overrides of all shapes: AITER's ``--indtype``, ``--outdtype`` and ``--all_bias``.

    Attributes:
        indtype: dtype of the activations; "" for no change.
        outdtype: dtype of the output; "" for `indtype` if given, or bf16 if that has 8 bits.
        all_bias: whether to list each shape with and without a bias.
    """

    indtype: str = ""
    outdtype: str = ""
    all_bias: bool = False


def override_shapes(op: Op, rows: Iterable[Untuned], overrides: ShapeOverrides) -> tuple[Untuned, ...]:
    """Override shapes; merge those that become equal, and add their counts.

    Raises:
        UserError: the op has no such column, or cannot have the dtype.
    """
    cells_set = _overridden_columns(op, overrides)
    folded: dict[tuple[Shape, int, str], Untuned] = {}
    for row in rows:
        cells = {column: text for column, text in op.columns.format(row.shape).items() if text} | cells_set
        for bias in ({"bias": "False"}, {"bias": "True"}) if overrides.all_bias else ({},):
            try:
                shape = op.columns.parse(cells | bias)
            except UserError as error:
                stated = ", ".join(f"{column}={text}" for column, text in cells_set.items())
                raise UserError(f"{op.name} cannot have {stated}: {error}; choose another op with --op") from None
            key = (shape, row.cu_num, row.gfx)
            folded[key] = folded[key].joined(row) if key in folded else attrs.evolve(row, shape=shape)
    return tuple(folded.values())


def dtype_column(op: Op) -> str:
    """Return the column of an op's activation dtype; "" where it has none."""
    return next((column for column in ("dtype", "q_dtype_w", "x_dtype") if column in (*op.columns.key, *op.columns.own)), "")


def _overridden_columns(op: Op, overrides: ShapeOverrides) -> dict[str, str]:
    """Return the columns of an op that are overridden, but for the bias, and their texts."""
    columns, taken = (*op.columns.key, *op.columns.own), dtype_column(op)
    requested = {
        "--indtype": (overrides.indtype, taken),
        "--outdtype": (overrides.outdtype, "outdtype"),
        "--all_bias": (overrides.all_bias, "bias"),
    }
    for flag, (value, column) in requested.items():
        if value and column not in columns:
            names = ", ".join(columns)
            raise UserError(f"{flag}: {op.name} has no such column (its columns are {names}); choose another op with --op")
    cells_set = {taken: overrides.indtype} if overrides.indtype else {}
    following = overrides.indtype if not overrides.indtype or dtype_bits(overrides.indtype) > 8 else "bf16"
    outdtype = overrides.outdtype or following
    return cells_set | ({"outdtype": outdtype} if outdtype and "outdtype" in columns else {})


def list_paths(names: Iterable[str], target: str) -> dict[str, Path]:
    """Return the output path of each op's list of shapes.

    In an existing folder, or one whose name ends in ``/``, files get AITER's names. Any other
    target is a file.

    Raises:
        UserError: one file for several ops, or it would replace captured shapes or another kind of
            file.
    """
    path, ops = expanded(target), [op_named(name) for name in names]
    folder = target.endswith("/") or path.is_dir()
    if len(ops) > 1 and not folder:
        listed = ", ".join(op.name for op in ops)
        raise UserError(f"{target}: one file cannot hold several ops ({listed}); name a folder, as {target}/, or one op with --op")
    paths = {op.name: path / op.columns.untuned_file if folder else path for op in ops}
    for op in ops:
        _check_replaceable(paths[op.name], op)
    return paths


def _check_replaceable(path: Path, op: Op) -> None:
    """Raise UserError for an existing file worth keeping: captured shapes, or not a list of this op."""
    if not present(path):
        return
    if not path.is_file():
        raise UserError(f"{path}: not a regular file; name a file, or a folder as {path}/")
    if os.path.realpath(path) == os.path.realpath(untuned_path(op)):
        raise UserError(f"{path}: would overwrite the captured shapes of {op.name}; name another file or folder")
    try:
        read_untuned(path, op)
    except TableError as error:
        raise UserError(f"{path}: would overwrite this file ({error}); name another file or folder") from None
