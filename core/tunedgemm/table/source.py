"""Source: open the rows of a tuned file, scanned or read line by line. Torch-free."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tunedgemm.backends.signed_files import SignatureError, check_signature
from tunedgemm.errors import TableError
from tunedgemm.table.csvfile import Problem, rows_of_content
from tunedgemm.table.folders import SHIPPED, TableLayer
from tunedgemm.table.index import RowSource
from tunedgemm.table.published import checked_body
from tunedgemm.table.scan import normalise, scan
from tunedgemm.table.sheet import present, read_raw

if TYPE_CHECKING:
    from tunedgemm.ops.op import Op

_log = logging.getLogger("tunedgemm")


def read_layers(op: Op, layers: Iterable[TableLayer]) -> tuple[list[list[RowSource]], list[tuple[Path, RowSource]]]:
    """Read the files of layers; return the sources of each layer, and the files named by the user.

    Broken files and lines are skipped and logged. A file that need not exist may be absent.

    Raises:
        TableError: a file of the layer ``instance`` is unusable.
    """
    by_layer: list[list[RowSource]] = []
    named: list[tuple[Path, RowSource]] = []
    for layer in layers:
        by_layer.append([])
        for path in layer.paths:
            if not layer.named_by_user and not present(path):
                continue
            try:
                source = open_source(path, op)
            except TableError as error:
                if layer.name == "instance":
                    raise
                source = RowSource.of(())
                source.problems.append(Problem(path, 0, str(error)))
            by_layer[-1].append(source)
            named += [(path, source)] if layer.named_by_user else []
            log_problems(source.problems)
    return by_layer, named


def log_problems(faults: Sequence[Problem]) -> None:
    """Log the first problem of a file, and how many more there are."""
    if faults:
        more = f" (and {len(faults) - 1} more; `tunedgemm table check` lists them)" if len(faults) > 1 else ""
        what = "a row that is not used" if faults[0].line else "a table that is not used"
        _log.warning("%s: %s%s", what, faults[0], more)


def open_source(path: Path, op: Op) -> RowSource:
    """Return the rows of a tuned file; small, special and broken ones are read at once.

    Raises:
        TableError: the file cannot be read, lacks a column that every row needs, or is another
            op's.
    """
    content = _signed(path)
    source = scan(path, op, normalise(content))
    if source is None or (source.problems and not len(source)):
        rows, problems = rows_of_content(path, op, content)
        source = RowSource.of(rows)
        source.problems = problems
    return source


def _signed(path: Path) -> bytes:
    """Return the bytes of a table below any provenance; check its checksum and a required signature.

    Raises:
        TableError: it cannot be read, its checksum is wrong, or a required signature is missing or
            wrong. Tables of the package need no signature.
    """
    target = Path(os.path.realpath(path))
    shipped = SHIPPED.resolve() in target.parents
    content = read_raw(target if shipped else path)  # a link may change after it was followed
    if not shipped:
        try:
            check_signature(path, content)
        except SignatureError as error:
            raise TableError(str(error)) from error
    return checked_body(path, content)
