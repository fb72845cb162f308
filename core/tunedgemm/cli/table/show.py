"""``table show``: the rows of a file, or of the merged layers, as a printed table."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.table import Table as Grid
from rich.text import Text

from tunedgemm.cli.table.files import op_of
from tunedgemm.console import console
from tunedgemm.device import current_device
from tunedgemm.printable import printable_line
from tunedgemm.table.csvfile import read_rows
from tunedgemm.table.folders import named_file
from tunedgemm.table.lookup import Table
from tunedgemm.tuner.report import sizes

#: All columns are shown from this width of the terminal on.
WIDE = 100


def run(arguments: argparse.Namespace) -> int:
    """Print the rows, and the faults of unreadable lines."""
    files = [] if arguments.file is None else [named_file(arguments.file)]
    op = op_of(arguments, files)
    if files:
        rows, problems = read_rows(files[0], op)
    else:
        merged = Table.load(op)
        rows, problems = list(merged.rows), list(merged.problems)
    device = current_device() if arguments.here else None
    output = console()
    headings = ("gfx", "cu", "shape", "solution", "us", "tflops", "from") if output.width >= WIDE else ("gfx", "shape", "solution", "us")
    grid = Grid(title=Text(printable_line(arguments.file or f"{op.name}: merged table")), title_justify="left")
    for heading in headings:
        grid.add_column(heading, overflow="fold", justify="right" if heading in ("cu", "us", "tflops") else "left")
    for row in rows:
        if device is None or (row.gfx, row.cu_num) == (device.gfx, device.cu_num):
            tflops = f"{op.flops(row.shape) / row.us / 1e6:.1f}" if row.valid else ""
            cells = {"gfx": row.gfx, "cu": str(row.cu_num), "shape": sizes(row.shape), "solution": str(row.solution)}
            cells |= {"us": f"{row.us:.2f}", "tflops": tflops, "from": f"{Path(row.source or '').name}:{row.line}"}
            grid.add_row(*(Text(cells[heading]) for heading in headings))
    output.print(grid)
    for problem in problems:
        print(f"problem: {problem}")
    return 0
