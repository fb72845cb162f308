"""``tunedgemm shapes``: what a model multiplies, as lists of shapes to tune."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from tunedgemm.backends.command import Command
from tunedgemm.cli.flags import add_changes, add_model
from tunedgemm.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as Grid

    from tunedgemm.cli.flags import Listed
    from tunedgemm.table.csvfile import Untuned


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
    from tunedgemm.cli.flags import listed, model_said
    from tunedgemm.ops import op_named
    from tunedgemm.table.csvfile import write_untuned
    from tunedgemm.tuner.report import console, number_of
    from tunedgemm.workload.lists import list_paths

    model = model_said(arguments)
    if not model:
        raise UserError("whose shapes? name a model with --model_dir: a folder with config.json, or a shipped one")
    found = listed(model, arguments)
    for note in found.notes:
        print(f"tunedgemm: note: {note}", file=sys.stderr)
    for line in found.commands:
        print(f"serve with: {line}", file=sys.stderr)
    if not arguments.output:
        _show(found, console(), verbose=arguments.verbose)
        return 0
    paths = list_paths(found.by_op, arguments.output)
    for name, path in paths.items():
        write_untuned(path, op_named(name), found.by_op[name])
        print(f"{path}: {number_of(len(found.by_op[name]), 'shape')} of {name}")
    return 0


@attrs.frozen
class _Form:
    """The table as it is laid out.

    Attributes:
        headings: of the columns.
        cells: of each line, by heading.
        breaks: the columns whose cells may be broken at spaces.
        framed: with lines around cells.
    """

    headings: tuple[str, ...]
    cells: tuple[Mapping[str, str], ...]
    breaks: tuple[str, ...] = ("layer",)
    framed: bool = True

    def widths(self, room: int) -> list[int]:
        """The columns of text that each column of the table gets of *room*; none where a word would be broken."""
        texts = [[heading, *(line[heading] for line in self.cells)] for heading in self.headings]
        whole = [max(map(len, column)) for column in texts]
        words = [max(len(word) for text in column for word in text.split()) for column in texts]
        widths = [least if heading in self.breaks else most for heading, least, most in zip(self.headings, words, whole, strict=True)]
        spare = room - sum(widths) - (3 * len(widths) + 1 if self.framed else 2 * len(widths) - 1)
        for place in reversed(range(len(widths))) if spare >= 0 else ():
            more = min(spare, whole[place] - widths[place])
            widths[place] += more
            spare -= more
        return widths if spare >= 0 else []

    def grid(self, widths: list[int]) -> Grid:
        """The table with columns so wide; without *widths*, as it comes."""
        from rich import box
        from rich.table import Table as Grid
        from rich.text import Text

        grid = Grid() if self.framed else Grid(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        for place, heading in enumerate(self.headings):
            left = heading in ("layer", "op", "dtype", "TP")
            grid.add_column(heading, justify="left" if left else "right", overflow="fold", width=widths[place] if widths else None)
        for line in self.cells:
            grid.add_row(*(Text(line[heading]) for heading in self.headings))
        return grid


def _show(found: Listed, output: Console, *, verbose: bool) -> None:
    """Print the products, one line for all their M, or with *verbose* every shape, in the fullest form that breaks no word."""
    from rich.text import Text

    output.print(Text(str(found)), soft_wrap=True)
    forms = _forms(found, verbose=verbose)
    form = next((form for form in forms if form.widths(output.width)), forms[-1])
    output.print(form.grid(form.widths(output.width)))


def _forms(found: Listed, *, verbose: bool) -> list[_Form]:
    """The fullest first; then layers by the last two parts of their names, no dtypes, no lines around cells, and broken cells."""
    cells = tuple(_lines(found, every=verbose))
    headings = ("layer", "op", *(("M",) if verbose else ()), "N", "K", "dtype", *(("TP",) if len(found.models) > 1 else ()), "a pass")
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
