"""``tunedgemm table show|check|merge``: the merged table or one file for people, the strict judge of a file, and one table of several."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from tunedgemm.command import Command
from tunedgemm.errors import TableError

#: All columns are shown from this width of the terminal on.
WIDE = 100


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="show|check|merge", required=True)
    file = "a tuned CSV, or the bare name of a shipped one"

    show = _action(actions, "show", "print the rows of a table")
    show.add_argument("file", nargs="?", help=f"{file}; default: the merged layers that dispatch uses")
    show.add_argument("--here", action="store_true", help="only the rows of the present device")

    check = _action(actions, "check", "exit 1 if a file has any fault")
    check.add_argument("file", help=file)

    merge = _action(actions, "merge", "put the rows of tables (of shards, of machines) into one")
    merge.add_argument("output", metavar="OUT", type=Path, help="the table that gets them; what it has stays")
    merge.add_argument("inputs", metavar="IN", nargs="+", help=f"{file}; it is not changed")
    merge.add_argument("--no-sort", dest="sort", action="store_false", help="leave OUT's rows in their places; default: by its key")


def _action(actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, says: str) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=says, description=says)
    parser.add_argument("--op", default="a16w16", help="op family (default: %(default)s)")
    parser.add_argument("-v", "--verbose", action="store_true", default=argparse.SUPPRESS, help="say more: full errors")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    return {"show": _show, "check": _check, "merge": _merge}[arguments.action](arguments)


def _show(arguments: argparse.Namespace) -> int:
    from rich.table import Table as Grid
    from rich.text import Text

    from tunedgemm.csvfile import read_rows
    from tunedgemm.device import current_device
    from tunedgemm.folders import named_file
    from tunedgemm.ops import op_named
    from tunedgemm.report import console, sizes
    from tunedgemm.table import Table

    op = op_named(arguments.op)
    if arguments.file is not None:
        rows, problems = read_rows(named_file(arguments.file), op)
    else:
        merged = Table.load(op)
        rows, problems = list(merged.rows), list(merged.problems)
    device = current_device() if arguments.here else None
    output = console()
    headings = ("gfx", "cu", "shape", "solution", "us", "tflops", "from") if output.width >= WIDE else ("gfx", "shape", "solution", "us")
    grid = Grid(title=Text(str(arguments.file or f"{op.name}: merged table")), title_justify="left")
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


def _check(arguments: argparse.Namespace) -> int:
    from tunedgemm.csvfile import read_rows
    from tunedgemm.folders import named_file
    from tunedgemm.ops import op_named

    file = named_file(arguments.file)
    rows, problems = read_rows(file, op_named(arguments.op))
    faults = [str(problem) for problem in problems]
    faults += [f"{row.source}:{row.line}: err_ratio {row.err_ratio} is over 0.2" for row in rows if row.err_ratio > 0.2]
    keys = Counter((row.gfx, row.cu_num, row.device, row.shape) for row in rows)
    faults += [f"{file}: {count} rows for {shape} on {gfx}/{cu_num}" for (gfx, cu_num, _, shape), count in keys.items() if count > 1]
    print("\n".join(faults) or f"{file}: {len(rows)} rows, no fault")
    return 1 if faults else 0


def _merge(arguments: argparse.Namespace) -> int:
    """Fold tables into one; every input is read before anything is written. Exit code 1 where a line could not be read."""
    from tunedgemm.csvfile import fold, read_rows
    from tunedgemm.folders import named_file
    from tunedgemm.ops import op_named

    op, rows, lost = op_named(arguments.op), [], 0
    files = [named_file(text) for text in arguments.inputs]
    if arguments.output.resolve() in [file.resolve() for file in files]:
        raise TableError(f"{arguments.output} is both OUT and IN: what OUT has stays, so name it once")
    for file in files:
        found, problems = read_rows(file, op)
        understood = {row.line for row in found}
        for problem in problems:
            unread = problem.line not in understood
            lost += unread
            print(f"left out: {problem}" if unread else f"note: {problem}")
        print(f"{file}: {len(found)} rows")
        rows += found
    conflicts = fold(arguments.output, op, rows, sort=arguments.sort)
    for conflict in conflicts:
        print(f"conflict, the lowest time stays: {conflict}")
    kept, _ = read_rows(arguments.output, op)
    print(f"{arguments.output}: {len(kept)} rows, {len(conflicts)} conflicts, {lost} lines left out")
    return 1 if lost else 0


command = Command("table", "show the tuned table, check one file, or merge several", _add_arguments, _run)
