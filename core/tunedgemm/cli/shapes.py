"""``tunedgemm shapes``: the products of a model, as lists of shapes to tune."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from tunedgemm.backends.command import Command
from tunedgemm.cli.flags import add_model, add_overrides
from tunedgemm.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table as Grid

    from tunedgemm.cli.flags import Listed
    from tunedgemm.table.untuned import Untuned
    from tunedgemm.text.console import Console


#: Headings of columns that are aligned to the left.
_LEFT = ("layer", "op", "dtype", "TP")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model and products")
    add_model(model)
    model.add_argument("--op", default="", help="only the shapes of this op; default: of all ops of the model")
    shapes = parser.add_argument_group("changes of all shapes")
    add_overrides(shapes)
    shapes.add_argument("--preshuffle", action="store_true", help="shuffled weights: the op for them if it exists, else their layout")
    written = "file to write, or a folder (existing, or ending in /) for a file of each op; default: print a table"
    parser.add_argument("-o", "--output", default="", metavar="FILE|FOLDER/", help=written)


def _run(arguments: argparse.Namespace) -> int:
    from tunedgemm.cli.flags import listed, models_of
    from tunedgemm.ops import op_named
    from tunedgemm.table.untuned import write_untuned
    from tunedgemm.text.console import console
    from tunedgemm.tuner.report import number_of
    from tunedgemm.workload.lists import list_paths

    models = models_of(arguments)
    if not models:
        raise UserError("no model is named; pass --model_dir: a folder with config.json, or a shipped model")
    selected = listed(models, arguments)
    for note in selected.notes:
        print(f"tunedgemm: note: {note}", file=sys.stderr)
    for line in selected.commands:
        print(f"serve with: {line}", file=sys.stderr)
    if not arguments.output:
        _show(selected, console(), verbose=arguments.verbose)
        return 0
    paths = list_paths(selected.by_op, arguments.output)
    for name, path in paths.items():
        write_untuned(path, op_named(name), selected.by_op[name])
        print(f"{path}: {number_of(len(selected.by_op[name]), 'shape')} of {name}")
    return 0


@attrs.frozen
class _Form:
    """One layout of the printed table.

    Attributes:
        headings: the columns' headings. cells: the cells of each line, by heading.
        breaks: the columns whose cells may wrap at spaces.
        framed: whether lines surround the cells.
    """

    headings: tuple[str, ...]
    cells: tuple[Mapping[str, str], ...]
    breaks: tuple[str, ...] = ("layer",)
    framed: bool = True

    def widths(self, room: int) -> list[int]:
        """Distribute *room* text columns over the table's columns; return [] if a word would not fit."""
        texts = [[heading, *(line[heading] for line in self.cells)] for heading in self.headings]
        whole = [max(map(len, column)) for column in texts]
        words = [max(len(word) for text in column for word in text.split()) for column in texts]
        widths = [least if heading in self.breaks else most for heading, least, most in zip(self.headings, words, whole, strict=True)]
        spare = room - sum(widths) - (3 * len(widths) + 1 if self.framed else 2 * len(widths) - 1)
        for index in reversed(range(len(widths))) if spare >= 0 else ():
            more = min(spare, whole[index] - widths[index])
            widths[index] += more
            spare -= more
        return widths if spare >= 0 else []

    def grid(self, widths: list[int]) -> Grid:
        """Return the table with these column widths; without *widths*, with rich's."""
        from rich import box
        from rich.table import Table as Grid
        from rich.text import Text

        grid = Grid() if self.framed else Grid(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        for index, heading in enumerate(self.headings):
            grid.add_column(
                heading, justify="left" if heading in _LEFT else "right", overflow="fold", width=widths[index] if widths else None
            )
        for line in self.cells:
            grid.add_row(*(Text(line[heading]) for heading in self.headings))
        return grid


def _show(selected: Listed, output: Console, *, verbose: bool) -> None:
    """Print a line a product, or with *verbose* a line a shape, in the fullest form that breaks no word."""
    from rich.text import Text

    from tunedgemm.text.console import Column, grid_of, print_grid

    output.print(Text(str(selected)), soft_wrap=True)
    forms = _forms(selected, verbose=verbose)
    if output.grows:
        columns = [Column(heading, right=heading not in _LEFT) for heading in forms[0].headings]
        print_grid(grid_of(columns, forms[0].cells), output)
        return
    form = next((form for form in forms if form.widths(output.width)), forms[-1])
    output.print(form.grid(form.widths(output.width)))


def _forms(selected: Listed, *, verbose: bool) -> list[_Form]:
    """List the layouts, the fullest first.

    The others shorten layers' names to two parts, leave out dtypes and lines, then wrap cells.
    """
    cells = tuple(_lines(selected, every=verbose))
    headings = ("layer", "op", *(("M",) if verbose else ()), "N", "K", "dtype", *(("TP",) if len(selected.models) > 1 else ()), "a pass")
    short = tuple({**line, "layer": " ".join(".".join(name.split(".")[-2:]) for name in line["layer"].split())} for line in cells)
    broken = tuple({**line, "layer": line["layer"].replace(".", ".\n"), "TP": line["TP"].replace(",", ", ")} for line in short)
    fewer = tuple(heading for heading in headings if heading != "dtype")
    return [
        _Form(headings, cells),
        _Form(headings, short),
        _Form(fewer, short),
        _Form(fewer, short, framed=False),
        _Form(fewer, short, breaks=("layer", "op"), framed=False),
        _Form(fewer, broken, breaks=("layer", "op", "TP", "a pass"), framed=False),
    ]


def _lines(selected: Listed, *, every: bool) -> list[dict[str, str]]:
    """Return the table's cells by heading: of every shape, or only of those with the least M."""
    ranks_of: dict[Untuned, list[int]] = {}
    for model in selected.models:
        for rows in model.by_op.values():
            for row in rows:
                if every or row.shape.m == selected.rows[0]:
                    ranks_of.setdefault(row, []).append(model.tp)
    return [_cells(row, ranks) for row, ranks in ranks_of.items()]


def _cells(row: Untuned, ranks: list[int]) -> dict[str, str]:
    shape, extra = row.shape, dict(row.shape.extra)
    words = [shape.op]
    words += [f"x{extra['B']}"] if "B" in extra else []
    words += [f"{extra['expert']} experts, top {extra['topk']}"] if "expert" in extra else []
    words += ["+ bias"] if shape.bias else []
    words += [shape.layout] if shape.layout != "row" else []
    multiplied = str(extra.get("q_dtype_w", shape.dtype))
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


command = Command("shapes", "list a model's products, as shapes to tune, from its config.json", _add_arguments, _run)
