"""``table show``: the rows of a file, or of the merged layers, as a printed table."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunedgemm.cli.document import print_document
from tunedgemm.cli.table.files import op_of, row_facts
from tunedgemm.device import current_device
from tunedgemm.dispatch.settings import BATCH_INVARIANT
from tunedgemm.ops.op import Op
from tunedgemm.process.variables import switched_on
from tunedgemm.table.csvfile import Problem, read_rows
from tunedgemm.table.folders import named_file
from tunedgemm.table.lookup import Table
from tunedgemm.table.row import Row
from tunedgemm.text.console import Column, console, grid_of, print_grid
from tunedgemm.tuner.report import sizes

_COLUMNS = (
    "gfx", Column("cu", right=True, optional=True), "shape", "solution", Column("us", right=True),
    Column("tflops", right=True, optional=True), Column("from", optional=True),
)  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Print the rows, and the faults of unreadable lines."""
    files = [] if arguments.file is None else [named_file(arguments.file)]
    op = op_of(arguments, files)
    problems: Sequence[Problem]
    if files:
        rows, problems = read_rows(files[0], op)
    else:
        merged = Table.load(op, invariant=switched_on(BATCH_INVARIANT))
        rows, problems = list(merged.rows), merged.problems
    if arguments.here:
        device = current_device()
        rows = [row for row in rows if (row.gfx, row.cu_num) == (device.gfx, device.cu_num)]
    if arguments.json:
        _print_json(op, files, rows, problems)
        return 0
    title = arguments.file or f"{op.name}: merged table"
    print_grid(grid_of(_COLUMNS, (_cells(row, op) for row in rows), title), console())
    for problem in problems:
        print(f"problem: {problem}")
    return 0


def _print_json(op: Op, files: Sequence[Path], rows: Sequence[Row], problems: Sequence[Problem]) -> None:
    shown = [{**row_facts(row), "tflops": _tflops(row, op)} for row in rows]
    facts: dict[str, Any] = {"op": op.name, "file": files[0] if files else None, "rows": shown}
    print_document("table.show", 1, {**facts, "problems": list(map(str, problems))})


def _tflops(row: Row, op: Op) -> float | None:
    return op.flops(row.shape) / row.us / 1e6 if row.valid else None


def _cells(row: Row, op: Op) -> dict[str, str]:
    tflops = _tflops(row, op)
    cells = {"gfx": row.gfx, "cu": str(row.cu_num), "shape": sizes(row.shape), "solution": str(row.solution), "us": f"{row.us:.2f}"}
    return cells | {"tflops": "" if tflops is None else f"{tflops:.1f}", "from": f"{Path(row.source or '').name}:{row.line}"}
