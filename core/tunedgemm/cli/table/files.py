"""Shared by the actions: the op of their files, and a row as text."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunedgemm.ops import op_named
from tunedgemm.ops.op import Op
from tunedgemm.table.csvfile import infer_op
from tunedgemm.table.row import Row


def op_of(arguments: argparse.Namespace, files: Sequence[Path]) -> Op:
    """Return the op of ``--op``, else that of the files.

    Raises:
        UserError: the op is unknown, the files fit none or several ops, or one cannot be read.
    """
    return op_named(arguments.op) if arguments.op else infer_op(files)


def shape_text(row: Row) -> str:
    """Format a row's shape and device."""
    units = str(row.cu_num) if row.cu_num else "any"
    return f"{row.shape} on {row.device or row.gfx or 'any device'}/{units}"


def solution_text(row: Row) -> str:
    """Format a row's solution and time."""
    return f"{row.solution} {row.us:.2f} us"


def row_facts(row: Row) -> dict[str, Any]:
    """Return a row's fields for a JSON document."""
    device = {"gfx": row.gfx, "cu_num": row.cu_num, "device": row.device}
    tuned = {"us": row.us, "err_ratio": row.err_ratio, "libver": row.libver, "bit_class": row.bit_class, "valid": row.valid}
    origin = {"source": row.source, "line": row.line, "extra": dict(row.extra)}
    return {**device, "shape": row.shape, "solution": row.solution, **tuned, **origin}
