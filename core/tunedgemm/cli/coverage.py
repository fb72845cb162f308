"""``tunedgemm coverage``: the share of a workload's calls with exact rows, and what to tune next."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tunedgemm.backends.command import Command
from tunedgemm.cli.document import add_json
from tunedgemm.errors import UserError
from tunedgemm.process.paths import expanded

if TYPE_CHECKING:
    from tunedgemm.analysis.coverage import Coverage, Next

#: Seconds of --measure without a number.
_SECONDS = 60.0
#: Rounding error of a share, in per cent: 29 of 100 calls are 28.999999999999996 %.
_ROUNDING = 1e-9


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    scope = parser.add_argument_group("calls, device and tables")
    add = scope.add_argument
    add("files", nargs="*", metavar="FILE", help="lists of shapes, of any ops; default: every captured file of the user folder")
    add("--op", default="", help="op of the files; default: that of each file's columns and name")
    add("--device", default="", metavar="GFX:CU[:NAME]", help="another device, such as gfx942:304; default: the present one")
    add("--table", action="append", default=[], metavar="FILE", help="a table that ranks above all others; repeat for other ops")
    add("--shipped", action="store_true", help="ask the package's tables alone: which calls they serve before any tuning")
    add("--replays", default="1", metavar="N|M:N,M:N", help="number of replays of all graphs, or by the M recorded in them (default: 1)")
    times = parser.add_argument_group("times of calls")
    add = times.add_argument
    add("--against", action="append", default=[], metavar="TABLE", help="a table whose rows and trials are known times of this device")
    add("--measure", nargs="?", const=_SECONDS, default=0.0, type=float, metavar="SECONDS",
        help=f"time the solutions in use, heaviest first, for this long (default: {_SECONDS:g})")  # fmt: skip
    shown = parser.add_argument_group("output")
    add = shown.add_argument
    add("--by", default="", choices=("op", "layer", "shape"), help="sum up by op, by layer (a shape without its M) or by shape")
    add("--next", type=int, default=10, metavar="N", help="layers to tune next (default: %(default)s)")
    add("-o", "--output", default="", metavar="FILE", help="write the shapes to tune next, for `tune -i`; for several ops to a FOLDER/")
    add("--csv", type=expanded, metavar="FILE", help="write every shape with its solution and time")
    add_json(shown)
    add("--min-exact", type=float, metavar="PCT", help="exit 1 if exact and pinned rows serve less than PCT per cent of the calls")


def _run(arguments: argparse.Namespace) -> int:
    from tunedgemm.analysis.coverage import SHIPPED, TUNED, coverage
    from tunedgemm.analysis.coverage.show import percent, print_coverage, print_next, write_entries
    from tunedgemm.cli.coveragejson import print_json
    from tunedgemm.device import device_of_text
    from tunedgemm.text.console import console

    least = arguments.min_exact
    if least is not None and not 0.0 <= least <= 100.0:
        raise UserError(f"--min-exact: expected per cent in 0 to 100 (got {least:g})")
    if arguments.shipped and arguments.table:
        raise UserError("--shipped and --table: --shipped asks the package's tables alone; leave out one of them")
    if arguments.next < 0:  # before any measurement
        raise UserError(f"--next: must be at least 0 (got {arguments.next})")
    if arguments.output and not arguments.next:
        raise UserError("-o and --next 0: -o writes the shapes to tune next, and --next 0 selects none; leave out one of them")
    result = coverage(
        arguments.files or None,
        op=arguments.op,
        device=device_of_text(arguments.device) if arguments.device else None,
        replays=arguments.replays,
        tables=SHIPPED if arguments.shipped else arguments.table,
        against=arguments.against,
        measure=arguments.measure,
    )
    following = result.next(arguments.next)
    if arguments.csv is not None:
        write_entries(result, arguments.csv)
    lines = _commands(arguments, result, following)
    if arguments.json:
        print_json(result, following, by=arguments.by, commands=lines)
        return 0 if _suffices(result, least) else 1
    output = console()
    print_coverage(result, output, by=arguments.by, verbose=arguments.verbose)
    if arguments.next:
        print_next(following, output, verbose=arguments.verbose)
    for line in [*lines, *([f"every shape: {arguments.csv}"] if arguments.csv is not None else [])]:
        print(line)
    if _suffices(result, least):
        return 0
    share = percent(result.share(*TUNED, by="calls"))
    print(f"below --min-exact {least:g}: {share} of calls are served by rows of exactly their M, or by pins")
    return 1


def _commands(arguments: argparse.Namespace, result: Coverage, following: Sequence[Next]) -> list[str]:
    """Return the commands that tune the proposals; with -o write the lists of shapes."""
    from tunedgemm.analysis.coverage import write_next
    from tunedgemm.ops import op_named

    if not following:
        return [f"{arguments.output}: not written; there is nothing to tune"] if arguments.output else []
    ops = list(dict.fromkeys(proposal.layer.op for proposal in following))
    if arguments.output:
        paths = write_next(following, arguments.output, result.paths)
        return [_tune(op, path, following) for op, path in paths.items()]
    several = len(ops) > 1
    target = "next/" if several else "next.csv"
    again = ["tunedgemm", "coverage", *arguments.files]
    for flag in ("op", "device"):
        again += [f"--{flag}", getattr(arguments, flag)] if getattr(arguments, flag) else []
    again += ["--replays", arguments.replays] if arguments.replays != "1" else []
    for flag in ("table", "against"):
        again += [word for path in getattr(arguments, flag) for word in (f"--{flag}", path)]
    again += ["--shipped"] if arguments.shipped else []
    again += ["--measure", f"{arguments.measure:g}"] if arguments.measure else []
    again += ["--next", str(arguments.next)] if arguments.next != 10 else []
    lists = [Path(target) / op_named(op).columns.untuned_file if several else Path(target) for op in ops]
    return [shlex.join([*again, "-o", target]), *(_tune(op, path, following) for op, path in zip(ops, lists, strict=True))]


def _tune(op: str, path: Path, following: Sequence[Next]) -> str:
    """Return the command that tunes a list, with --all if unusable rows would hide its shapes."""
    from tunedgemm.ops import DEFAULT_OP

    unused = any(entry.passed for proposal in following if proposal.layer.op == op for entry in proposal.entries)
    words = ["tunedgemm", "tune", *(["--op", op] if op != DEFAULT_OP else []), "-i", str(path), *(["--all"] if unused else [])]
    return shlex.join(words)


def _suffices(result: Coverage, least: float | None) -> bool:
    """Tell whether *least* per cent of the calls are tuned; pins are deliberate and count as exact."""
    from tunedgemm.analysis.coverage import TUNED

    return least is None or result.share(*TUNED, by="calls") * 100.0 >= least - _ROUNDING


command = Command("coverage", "show the share of a workload's calls with exact rows, and what to tune next", _add_arguments, _run)
