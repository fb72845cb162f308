"""``tunedgemm shapes``: what a model multiplies, as lists of shapes to tune."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from tunedgemm.command import Command
from tunedgemm.errors import UserError
from tunedgemm.flags import add_changes, add_model

if TYPE_CHECKING:
    from rich.console import Console

    from tunedgemm.csvfile import Untuned
    from tunedgemm.flags import Listed

#: From this width on there is a column of dtypes, and names of layers are whole.
_WIDE = 100


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("which model, and which of its products")
    add_model(model)
    model.add_argument("--op", default="", help="only the shapes of this op; default: of every op that the model has products of")
    shapes = parser.add_argument_group("what its shapes are")
    add_changes(shapes)
    shapes.add_argument("--preshuffle", action="store_true", help="shuffled weights: the twin of an op that has one, else their layout")
    written = "file to write, or a folder, there already or ending in /, with a file for each op; default: a table on the screen"
    parser.add_argument("-o", "--output", default="", metavar="FILE|FOLDER/", help=written)


def _run(arguments: argparse.Namespace) -> int:
    from tunedgemm.asked import list_paths
    from tunedgemm.csvfile import write_untuned
    from tunedgemm.flags import listed, model_said
    from tunedgemm.ops import op_named
    from tunedgemm.report import console, number_of

    model = model_said(arguments)
    if not model:
        raise UserError("whose shapes? name a model with --model_dir: a folder with config.json, or a shipped one")
    found = listed(model, arguments)
    for note in found.notes:
        print(f"tunedgemm: note: {note}", file=sys.stderr)
    if not arguments.output:
        _show(found, console(), verbose=arguments.verbose)
        return 0
    paths = list_paths(found.by_op, arguments.output)
    for name, path in paths.items():
        write_untuned(path, op_named(name), found.by_op[name])
        print(f"{path}: {number_of(len(found.by_op[name]), 'shape')} of {name}")
    return 0


def _show(found: Listed, output: Console, *, verbose: bool) -> None:
    """Print the products, one line for all their M, or with *verbose* every shape."""
    from rich.table import Table as Grid
    from rich.text import Text

    output.print(Text(str(found)), soft_wrap=True)
    headings = ["layer", "op", *(["M"] if verbose else []), "N", "K", "dtype", "TP", "a pass"]
    left_out = {"dtype"} if output.width < _WIDE else set()
    left_out |= {"TP"} if len(found.models) == 1 else set()
    shown = [heading for heading in headings if heading not in left_out]
    grid = Grid()
    for heading in shown:
        grid.add_column(heading, justify="left" if heading in ("layer", "op", "dtype", "TP") else "right", overflow="fold")
    for cells in _lines(found, every=verbose):
        if output.width < _WIDE:
            cells["layer"] = " ".join(".".join(name.split(".")[-2:]) for name in cells["layer"].split())
        grid.add_row(*(Text(cells[heading]) for heading in shown))
    output.print(grid)


def _lines(found: Listed, *, every: bool) -> list[dict[str, str]]:
    """The cells of the table by heading: of each shape, or of those with the least M alone, of which layers and at which TP."""
    places: dict[Untuned, list[int]] = {}
    for model in found.models:
        for rows in model.by_op.values():
            for row in rows:
                if every or row.shape.m == found.rows[0]:
                    places.setdefault(row, []).append(model.tp)
    return [_cells(row, ranks) for row, ranks in places.items()]


def _cells(row: Untuned, ranks: list[int]) -> dict[str, str]:
    shape, known = row.shape, dict(row.shape.extra)
    words = [shape.op]
    words += [f"x{known['B']}"] if "B" in known else []
    words += [f"{known['expert']} experts, top {known['topk']}"] if "expert" in known else []
    words += ["+ bias"] if shape.bias else []
    words += [shape.layout] if shape.layout != "row" else []
    multiplied = str(known.get("q_dtype_w", shape.dtype))
    return {
        "layer": row.layer,
        "op": " ".join(words),
        "M": str(shape.m),
        "N": str(shape.n),
        "K": str(shape.k),
        "dtype": multiplied if multiplied == shape.outdtype else f"{multiplied}->{shape.outdtype}",
        "TP": ",".join(map(str, ranks)),
        "a pass": str(row.count),
    }


command = Command("shapes", "list what a model multiplies, as shapes to tune, from its config.json", _add_arguments, _run)
