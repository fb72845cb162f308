"""``tunedgemm explain``: the solution that serves a shape, and why others do not."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunedgemm.backends.command import Command
from tunedgemm.cli.document import add_json, print_document
from tunedgemm.errors import UserError

if TYPE_CHECKING:
    from tunedgemm.dispatch.choice import Explanation
    from tunedgemm.dispatch.explain import RowExplanation
    from tunedgemm.dispatch.offer import Offer
    from tunedgemm.ops.op import Op
    from tunedgemm.shape import Shape


#: Most digits of a line's number.
_DIGITS = 12


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "shape",
        metavar="M,N,K|FILE:LINE",
        help="sizes in the order of the op's key, such as 16,1280,8192, or 8,16,1280,8192 for B,M,N,K; or a line: of a list its "
        "shape, of a table its row on the row's device",
    )
    parser.add_argument("--op", default="", help="op family; default: that of FILE, else a16w16")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="COLUMN=TEXT",
        help="a column of the op's table, in the table's spelling; repeatable",
    )
    parser.add_argument(
        "--dtype", default="", help="short for --set dtype=…, and for the q_dtype_w of an op that has it (default: the op's)"
    )
    parser.add_argument("--outdtype", default="", help="short for --set outdtype=…; default: the op's")
    parser.add_argument("--bias", action="store_true", help="short for --set bias=True")
    parser.add_argument("--layout", default="", help="short for --set layout=…, the layout of the weight; default: the op's")
    parser.add_argument(
        "--device", default="", metavar="GFX:CU[:NAME]", help="another device, such as gfx942:304; default: the present one"
    )
    parser.add_argument("--table", action="append", default=[], metavar="FILE", help="a tuned file above all others; repeatable")
    add_json(parser)


def _run(arguments: argparse.Namespace) -> int:
    from tunedgemm.device import as_present, device_of_text
    from tunedgemm.dispatch.dispatcher import Dispatcher
    from tunedgemm.dispatch.explain import explain_row
    from tunedgemm.ops import op_named
    from tunedgemm.table.folders import named_file
    from tunedgemm.workload.lists import is_tuned_file, op_of_file, shape_of_line

    device = as_present(device_of_text(arguments.device)) if arguments.device else None
    tables = [named_file(name) for name in arguments.table]
    name, colon, line = arguments.shape.rpartition(":")
    if not (colon and line.isdecimal() and len(line) <= _DIGITS):
        op, shape = _op_and_shape(arguments, device.gfx if device else "")
        _print(Dispatcher(op, above=tables).explain(shape, device), as_json=arguments.json)
        return 0
    path: Path = named_file(name)
    op = op_named(arguments.op) if arguments.op else op_of_file(path)
    if _stated_columns(arguments, op):
        raise UserError(f"{arguments.shape}: already has every field; leave out --set and its short forms, or give sizes")
    if is_tuned_file(path):
        _print(explain_row(op, path, int(line), device, tables), as_json=arguments.json)
    else:
        shape, named = shape_of_line(op, path, int(line), device.gfx if device else "")
        _print(Dispatcher(op, above=tables).explain(shape, device or (named and as_present(named))), as_json=arguments.json)
    return 0


def _print(found: Explanation | RowExplanation, *, as_json: bool) -> None:
    from tunedgemm.dispatch.explain import RowExplanation

    if not as_json:
        print(found)
        return
    of_row = found if isinstance(found, RowExplanation) else None
    explanation = found.explanation if isinstance(found, RowExplanation) else found
    facts = {
        "shape": explanation.shape,
        "device": explanation.device,
        "runs": None if explanation.refused else _offer_facts(explanation.offer),
        "refused": explanation.refused,
        "certain": explanation.certain,
        "tuned": explanation.tuned,
        "elsewhere": explanation.elsewhere,
        "passed_over": [{**_offer_facts(offer), "reason": reason} for offer, reason in explanation.passed_over],
        "row": {"source": of_row.row.source, "line": of_row.row.line, "verdict": of_row.verdict} if of_row else None,
    }
    print_document("explain", 1, facts)


def _offer_facts(offer: Offer) -> dict[str, Any]:
    row = {"source": offer.match.row.source, "line": offer.match.row.line, "m": offer.match.row.shape.m} if offer.match else None
    source = {"origin": offer.origin, "why": offer.why, "us": offer.us or None, "libver": offer.libver, "row": row}
    return {"solution": offer.solution, **source, "table_layer": offer.table_layer}


def _op_and_shape(arguments: argparse.Namespace, gfx: str) -> tuple[Op, Shape]:
    """Return the op and the shape of a command line with sizes; *gfx* is the named device's, or ""."""
    from tunedgemm.ops import DEFAULT_OP, op_named
    from tunedgemm.workload.lists import shape_of_texts

    op = op_named(arguments.op or DEFAULT_OP)
    sizes = [text.strip() for text in arguments.shape.split(",")]
    stated = _stated_columns(arguments, op)
    wanted = [column for column in op.columns.key if column not in stated][:3]
    if len(sizes) < 3 or not all(text.isdecimal() for text in sizes):
        raise UserError(f"expected three sizes or more, {','.join(wanted)}, or FILE:LINE (got {arguments.shape!r})")
    return op, shape_of_texts(op, sizes, stated, gfx)


def _stated_columns(arguments: argparse.Namespace, op: Op) -> dict[str, str]:
    """Return the columns that flags set, with their texts."""
    from tunedgemm.workload.lists import dtype_column, stated_cells

    stated = {}
    columns = (*op.columns.key, *op.columns.own)
    if arguments.dtype:
        stated[dtype_column(op) or "dtype"] = arguments.dtype
    stated |= {"outdtype": arguments.outdtype} if arguments.outdtype else {}
    stated |= {"bias": "True"} if arguments.bias else {}
    stated |= {"layout": arguments.layout} if arguments.layout and (arguments.layout != "row" or "layout" in columns) else {}
    return stated | stated_cells(arguments.set)


command = Command("explain", "show which solution serves a shape, and why others do not", _add_arguments, _run)
