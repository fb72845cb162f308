"""``tunedgemm coverage``: how much of what a workload calls has rows of its own, and what to tune next."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tunedgemm.backends.command import Command
from tunedgemm.errors import UserError

if TYPE_CHECKING:
    from tunedgemm.analysis.coverage import Coverage, Next

#: Seconds of --measure without a number.
_SECONDS = 60.0
#: Per cent that a share may be off when it is computed: 29 of 100 calls are 28.999999999999996 %.
_ROUNDING = 1e-9


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    judged = parser.add_argument_group("what is judged")
    add = judged.add_argument
    add("files", nargs="*", metavar="FILE", help="captured or listed shapes, of any ops; default: every captured file of the user folder")
    add("--op", default="", help="op of the files; default: that of each file's columns and name")
    add("--device", default="", metavar="GFX:CU[:NAME]", help="another device, as gfx942:304; default: the present one")
    add("--table", action="append", default=[], metavar="FILE", help="a table that ranks above all others; again for one of another op")
    add("--replays", default="1", metavar="N|M:N,M:N", help="how often graphs ran: all of them, or by the M recorded in them (default: 1)")
    times = parser.add_argument_group("how long calls take")
    add = times.add_argument
    add("--against", action="append", default=[], metavar="TABLE", help="a table whose rows, and trials beside it, tell what is possible")
    add("--measure", nargs="?", const=_SECONDS, default=0.0, type=float, metavar="SECONDS",
        help=f"time what runs now, heaviest first, for so long (default: {_SECONDS:g})")  # fmt: skip
    shown = parser.add_argument_group("what is told")
    add = shown.add_argument
    add("--by", default="", metavar="op|layer|shape", help="sum up by op, by layer (all of a shape but M) or by shape")
    add("--next", type=int, default=10, metavar="N", help="layers to tune next (default: %(default)s)")
    add("-o", "--output", default="", metavar="FILE", help="write what to tune next as shapes for `tune -i`; of several ops into a FOLDER/")
    add("--csv", type=Path, metavar="FILE", help="write every shape with its answer and time")
    add("--min-exact", type=float, metavar="PCT", help="exit 1 where fewer calls, in per cent, are answered by rows of exactly their M")


def _run(arguments: argparse.Namespace) -> int:
    from tunedgemm.analysis.coverage import BY, coverage
    from tunedgemm.analysis.coverage.show import print_coverage, print_next, write_entries
    from tunedgemm.device import device_of_text
    from tunedgemm.tuner.report import console

    least = arguments.min_exact
    if least is not None and not 0.0 <= least <= 100.0:
        raise UserError(f"--min-exact is a number of per cent, 0 to 100 (got {least:g})")
    if arguments.by and arguments.by not in BY:
        raise UserError(f"--by takes {', '.join(BY)} (got {arguments.by!r})")
    if arguments.next < 0:
        raise UserError(f"--next must be at least 0 (got {arguments.next})")
    if arguments.output and not arguments.next:
        raise UserError("-o writes what to tune next, of which --next 0 wants none: leave one of both out")
    if arguments.measure < 0:
        raise UserError(f"--measure takes seconds, more than 0 (got {arguments.measure:g})")
    found = coverage(
        arguments.files or None,
        op=arguments.op,
        device=device_of_text(arguments.device) if arguments.device else None,
        replays=arguments.replays,
        tables=arguments.table,
        against=arguments.against,
        measure=arguments.measure,
    )
    following = found.next(arguments.next)
    if arguments.csv is not None:
        write_entries(found, arguments.csv)
    lines = _commands(arguments, found, following)
    output = console()
    print_coverage(found, output, by=arguments.by, verbose=arguments.verbose)
    if arguments.next:
        print_next(following, output, verbose=arguments.verbose)
    for line in [*lines, *([f"every shape: {arguments.csv}"] if arguments.csv is not None else [])]:
        print(line)
    return _verdict(found, least)


def _commands(arguments: argparse.Namespace, found: Coverage, following: Sequence[Next]) -> list[str]:
    """The commands that tune what is to be tuned next; with -o the lists of shapes are written."""
    from tunedgemm.analysis.coverage import write_next
    from tunedgemm.ops import op_named

    if not following:
        return [f"{arguments.output}: not written, there is nothing to tune"] if arguments.output else []
    ops = list(dict.fromkeys(one.layer.op for one in following))
    if arguments.output:
        paths = write_next(following, arguments.output, found.paths)
        return [_tune(op, path, following) for op, path in paths.items()]
    several = len(ops) > 1
    target = "next/" if several else "next.csv"
    again = ["tunedgemm", "coverage", *arguments.files]
    for flag in ("op", "device"):
        again += [f"--{flag}", getattr(arguments, flag)] if getattr(arguments, flag) else []
    again += ["--replays", arguments.replays] if arguments.replays != "1" else []
    for flag in ("table", "against"):
        again += [word for path in getattr(arguments, flag) for word in (f"--{flag}", path)]
    again += ["--measure", f"{arguments.measure:g}"] if arguments.measure else []
    again += ["--next", str(arguments.next)] if arguments.next != 10 else []
    lists = [Path(target) / op_named(op).columns.untuned_file if several else Path(target) for op in ops]
    return [shlex.join([*again, "-o", target]), *(_tune(op, path, following) for op, path in zip(ops, lists, strict=True))]


def _tune(op: str, path: Path, following: Sequence[Next]) -> str:
    """The command that tunes a list; rows that are there and cannot be used would keep it from doing so."""
    from tunedgemm.ops import DEFAULT_OP

    unused = any(entry.passed for one in following if one.layer.op == op for entry in one.entries)
    words = ["tunedgemm", "tune", *(["--op", op] if op != DEFAULT_OP else []), "-i", str(path), *(["--all"] if unused else [])]
    return shlex.join(words)


def _verdict(found: Coverage, least: float | None) -> int:
    """The exit code, 1 below *least* per cent; pins count, for they are what is asked for where they are."""
    from tunedgemm.analysis.coverage import TUNED
    from tunedgemm.analysis.coverage.show import percent

    share = found.share(*TUNED, by="calls")
    if least is None or share * 100.0 >= least - _ROUNDING:
        return 0
    print(f"below --min-exact {least:g}: {percent(share)} of calls are answered by rows of exactly their M, or by pins")
    return 1


command = Command("coverage", "say how many of a workload's calls have rows of their own, and what to tune next", _add_arguments, _run)
