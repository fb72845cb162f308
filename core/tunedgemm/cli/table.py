"""``tunedgemm table show|check``: the merged table, or one file, for people; and the strict judge of a file."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from tunedgemm.command import Command
from tunedgemm.errors import TableError


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("show", "check"), help="show: print rows; check: exit 1 if a file has any fault")
    parser.add_argument(
        "file", nargs="?", help="a tuned CSV, or the bare name of a shipped one; default: the merged layers that dispatch uses"
    )
    parser.add_argument("--op", default="a16w16", help="op family (default: %(default)s)")
    parser.add_argument("--here", action="store_true", help="only the rows of the present device")


def _run(arguments: argparse.Namespace) -> int:
    from tunedgemm.folders import named_file

    arguments.file = None if arguments.file is None else named_file(arguments.file)
    return _show(arguments) if arguments.action == "show" else _check(arguments)


def _show(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table as Grid

    from tunedgemm.csvfile import read_rows
    from tunedgemm.device import current_device
    from tunedgemm.ops import op_named
    from tunedgemm.table import Table

    op = op_named(arguments.op)
    if arguments.file is not None:
        rows, problems = read_rows(arguments.file, op)
    else:
        merged = Table.load(op)
        rows, problems = list(merged.rows), list(merged.problems)
    device = current_device() if arguments.here else None
    grid = Grid(title=str(arguments.file or f"{op.name}: merged table"), title_justify="left")
    for heading in ("gfx", "cu", "shape", "solution", "us", "tflops", "from"):
        grid.add_column(heading, overflow="fold", justify="right" if heading in ("cu", "us", "tflops") else "left")
    for row in rows:
        if device is None or (row.gfx, row.cu_num) == (device.gfx, device.cu_num):
            tflops = f"{op.flops(row.shape) / row.us / 1e6:.1f}" if row.valid else ""
            shape = str(row.shape).removeprefix(f"{op.name} ")
            grid.add_row(
                row.gfx, str(row.cu_num), shape, str(row.solution), f"{row.us:.2f}", tflops, f"{Path(row.source or '').name}:{row.line}"
            )
    Console().print(grid)
    for problem in problems:
        print(f"problem: {problem}")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from tunedgemm.csvfile import read_rows
    from tunedgemm.ops import op_named

    if arguments.file is None:
        raise TableError("table check needs a file")
    rows, problems = read_rows(arguments.file, op_named(arguments.op))
    faults = [str(problem) for problem in problems]
    faults += [f"{row.source}:{row.line}: err_ratio {row.err_ratio} is over 0.2" for row in rows if row.err_ratio > 0.2]
    keys = Counter((row.gfx, row.cu_num, row.device, row.shape) for row in rows)
    faults += [
        f"{arguments.file}: {count} rows for {shape} on {gfx}/{cu_num}" for (gfx, cu_num, _, shape), count in keys.items() if count > 1
    ]
    print("\n".join(faults) or f"{arguments.file}: {len(rows)} rows, no fault")
    return 1 if faults else 0


command = Command("table", "show the tuned table, or check one file", _add_arguments, _run)
