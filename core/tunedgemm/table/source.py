"""Source: open the rows of a tuned file, scanned or read line by line. Torch-free."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tunedgemm.backends.signed_files import SignatureError, check_signature
from tunedgemm.errors import TableError
from tunedgemm.table.csvfile import rows_of_content
from tunedgemm.table.folders import SHIPPED
from tunedgemm.table.index import RowSource
from tunedgemm.table.published import checked_body
from tunedgemm.table.scan import normalise, scan
from tunedgemm.table.sheet import read_raw

if TYPE_CHECKING:
    from tunedgemm.ops.op import Op


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
