"""What the actions share: which op the files they are given are of, and a row in words."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tunedgemm.ops import op_named
from tunedgemm.ops.op import Op
from tunedgemm.table.csvfile import infer_op
from tunedgemm.table.row import Row


def op_of(arguments: argparse.Namespace, files: Sequence[Path]) -> Op:
    """The op of ``--op``, else that of the files.

    Raises:
        UserError: there is no such op, the files leave it open or are of several, or one cannot be
            read.
    """
    return op_named(arguments.op) if arguments.op else infer_op(files)


def asked(row: Row) -> str:
    """What a row answers for: its shape and its device."""
    units = str(row.cu_num) if row.cu_num else "any"
    return f"{row.shape} on {row.device or row.gfx or 'any device'}/{units}"


def answer(row: Row) -> str:
    """What a row says: its solution and time."""
    return f"{row.solution} {row.us:.2f} us"
