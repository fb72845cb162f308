"""``tunedgemm shapes``: products of a model or of another tuner's file, as shapes to tune."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tunedgemm.backends.command import Command
from tunedgemm.cli.flags import add_model, add_overrides
from tunedgemm.errors import UserError

if TYPE_CHECKING:
    from tunedgemm.cli.flags import Listed
    from tunedgemm.table.untuned import Untuned
    from tunedgemm.text.console import Console


#: Headings of columns that are aligned to the left.
_LEFT = ("layer", "op", "dtype", "TP")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    file = "another tuner's file, instead of a model: of TunableOp, hipBLASLt or its bench log, vLLM, SGLang or FlashInfer"
    parser.add_argument("--from", dest="file", type=Path, metavar="FILE", help=file)
    model = parser.add_argument_group("model and products")
    add_model(model)
    model.add_argument("--op", default="", help="only the shapes of this op; default: of all ops of the model")
    shapes = parser.add_argument_group("changes of all shapes")
    add_overrides(shapes)
    shapes.add_argument("--preshuffle", action="store_true", help="shuffled weights: the op for them if it exists, else their layout")
    device = "the device to tune for, such as sm_90:132, with --nsets vllm or sglang; default: the present one"
    parser.add_argument("--device", default="", metavar="GFX:CU[:NAME]", help=device)
    written = "file to write, or a folder (existing, or ending in /) for a file of each op; default: print a table"
    parser.add_argument("-o", "--output", default="", metavar="FILE|FOLDER/", help=written)


def _run(arguments: argparse.Namespace) -> int:
    from tunedgemm.ops import op_named
    from tunedgemm.table.untuned import write_untuned
    from tunedgemm.text.console import console
    from tunedgemm.tuner.report import number_of
    from tunedgemm.workload.lists import list_paths

    selected = _of_file(arguments) if arguments.file else _of_models(arguments)
    for note in selected.notes:
        print(f"tunedgemm: note: {note}", file=sys.stderr)
    for line in selected.commands:
        print(f"serve with: {line}", file=sys.stderr)
    if not arguments.output:
        _show(selected, console(), verbose=arguments.verbose or bool(arguments.file))
        return 0
    paths = list_paths(selected.by_op, arguments.output)
    for name, path in paths.items():
        write_untuned(path, op_named(name), selected.by_op[name])
        print(f"{path}: {number_of(len(selected.by_op[name]), 'shape')} of {name}")
    return 0


def _of_models(arguments: argparse.Namespace) -> Listed:
    from tunedgemm.cli.flags import listed, models_of
    from tunedgemm.device import current_device, device_of_text

    models = models_of(arguments)
    if not models:
        raise UserError("no model is named; pass --model_dir: a folder with config.json, or a shipped model; or --from FILE")
    return listed(models, arguments, lambda: device_of_text(arguments.device) if arguments.device else current_device())


def _of_file(arguments: argparse.Namespace) -> Listed:
    """Return the shapes of another tuner's file, which has its own M."""
    from tunedgemm.cli.flags import listed_file

    if arguments.model_dir or arguments.models or arguments.tp or arguments.nsets:
        raise UserError("--from: a file has the shapes of its workload; leave out --model_dir, --models, --tp and --nsets")
    return listed_file(arguments)


def _show(selected: Listed, output: Console, *, verbose: bool) -> None:
    """Print a line a product, or with *verbose* a line a shape; a narrow table shortens layers' names."""
    from rich.text import Text

    from tunedgemm.text.console import Column, grid_of, print_grid

    output.print(Text(str(selected)), soft_wrap=True)
    several, layers = len(selected.models) > 1, any(model.layers for model in selected.models)
    headings = ["op", *(("M",) if verbose else ()), "N", "K", "dtype", *(("TP",) if several else ())]
    headings = ["layer", *headings, "a pass"] if layers else [*headings, "calls"]
    columns = [Column(heading, heading not in _LEFT, heading in ("layer", "op"), heading == "dtype") for heading in headings]
    cells = list(_lines(selected, every=verbose))
    if not output.grows and not grid_of(columns, cells).widths(output.width):
        cells = [{**line, "layer": " ".join(".".join(name.split(".")[-2:]) for name in line["layer"].split())} for line in cells]
    print_grid(grid_of(columns, cells), output)


def _lines(selected: Listed, *, every: bool) -> list[dict[str, str]]:
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
    words += [f"{extra['w_format']}/{extra['w_group']}"] if "w_format" in extra else []
    words += [f"{extra['expert']} experts, top {extra['topk']}"] if "expert" in extra else []
    words += ["+ bias"] if shape.bias else []
    words += [shape.layout] if shape.layout != "row" else []
    words += [str(extra["scale_order"])] if "scale_order" in extra else []
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
        "calls": str(row.count),
    }


command = Command(
    "shapes", "list a model's products, as shapes to tune, from its config.json or another tuner's file", _add_arguments, _run
)
