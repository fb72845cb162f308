"""``tunedgemm bits``: whether tables, machines or versions give the same bits in batch-invariant mode."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tunedgemm.backends.command import Command
from tunedgemm.cli.document import add_json, print_document
from tunedgemm.errors import UserError

if TYPE_CHECKING:
    from tunedgemm.analysis.bit_labels import Pair, Proof
    from tunedgemm.device import Device
    from tunedgemm.ops.op import Op


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    files = "two tables to compare; with --prove, the tables to prove, by default the user's of batch-invariant mode"
    parser.add_argument("files", nargs="*", metavar="TABLE", help=files)
    parser.add_argument("--prove", action="store_true", help="run the rows' kernels on standard operands here, and print the bit classes")
    parser.add_argument("--op", default="", help="op of the tables; default: by their columns and names")
    add_json(parser)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.prove:
        return _prove(arguments)
    if len(arguments.files) != 2:
        raise UserError(f"bits: takes two tables to compare (got {len(arguments.files)}); --prove takes any number")
    return _compare(arguments)


def _compare(arguments: argparse.Namespace) -> int:
    """Print which groups of two tables have one bit class; return 1 unless all have."""
    from tunedgemm.analysis.bit_labels import DIFFERENT, MISSING, SAME, compared
    from tunedgemm.cli.table.files import op_of
    from tunedgemm.table.csvfile import read_rows
    from tunedgemm.table.folders import named_file

    files = [named_file(file) for file in arguments.files]
    op = op_of(arguments, files)
    pairs = compared(*(read_rows(file, op)[0] for file in files))
    counts = {verdict: sum(pair.verdict == verdict for pair in pairs) for verdict in (SAME, DIFFERENT, MISSING)}
    if arguments.json:
        groups = [{"shape": pair.shape, "first": pair.first, "second": pair.second, "verdict": pair.verdict} for pair in pairs]
        print_document("bits", 1, {"op": op.name, "files": files, "groups": groups, **counts})
    else:
        for pair in pairs:
            if pair.verdict != SAME or arguments.verbose:
                print(_pair_text(pair, files))
        print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()) if pairs else "no row of either table has a bit class")
    return 0 if pairs and counts[SAME] == len(pairs) else 1


def _pair_text(pair: Pair, files: Sequence[Path]) -> str:
    from tunedgemm.tuner.report import sizes

    sides = (f"{' '.join(labels) or 'no class'} in {file}" for labels, file in zip((pair.first, pair.second), files, strict=True))
    return f"{pair.verdict}: {sizes(pair.shape).removeprefix('M=0 ')}: {', '.join(sides)}"


def _prove(arguments: argparse.Namespace) -> int:
    """Print the bit class that each layer's kernels have here; return 1 where one is not the table's."""
    from tunedgemm.analysis.bit_labels import proved
    from tunedgemm.backends.registry import Registry
    from tunedgemm.device import current_device
    from tunedgemm.table.csvfile import read_rows

    device, registry = current_device(), Registry()
    found: list[tuple[Path, Proof]] = []
    for file, op in _tables(arguments):
        for proof in proved(read_rows(file, op)[0], op, device, registry):
            found.append((file, proof))
            if not arguments.json:
                print(proof_text(proof), flush=True)
    if arguments.json:
        _print_proofs(device, found)
    elif not found:
        print(f"no row for {device} has a bit class; `tunedgemm tune --batch-invariant` tunes them")
    return 0 if found and all(proof.agrees for _, proof in found) else 1


def _tables(arguments: argparse.Namespace) -> list[tuple[Path, Op]]:
    from tunedgemm.cli.table.files import op_of
    from tunedgemm.ops import op_named, ops
    from tunedgemm.table.folders import named_file, tuned_path
    from tunedgemm.table.sheet import present

    if arguments.files:
        return [(file, op_of(arguments, [file])) for file in map(named_file, arguments.files)]
    wanted = [op_named(arguments.op)] if arguments.op else ops().values()
    own = [(tuned_path(op, invariant=True), op) for op in wanted]
    return [(file, op) for file, op in own if present(file)]


def proof_text(proof: Proof) -> str:
    """Format the bits that a kernel has here, and those that its row states where they differ."""
    from tunedgemm.tuner.report import sizes

    row = proof.row
    kernel = f"{sizes(row.shape.with_m(0)).removeprefix('M=0 ')}: {row.solution}"
    if proof.agrees:
        return f"{kernel}: {proof.label}"
    found = proof.label or f"no bit class: {proof.fault}"
    return f"{kernel}: {found}; {row.source}:{row.line} has {row.bit_class}"


def _print_proofs(device: Device, found: Sequence[tuple[Path, Proof]]) -> None:
    kernels = [
        {
            "table": file,
            "line": proof.row.line,
            "shape": proof.row.shape.with_m(0),
            "solution": proof.row.solution,
            "label": proof.label,
            "bit_class": proof.row.bit_class,
            "agrees": proof.agrees,
            "fault": proof.fault,
        }
        for file, proof in found
    ]
    print_document("bits.prove", 1, {"device": device, "kernels": kernels})


command = Command("bits", "compare the bit classes of two tables, or prove those of one here", _add_arguments, _run)
