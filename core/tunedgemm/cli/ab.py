"""``tunedgemm ab``: two arms in turns on this machine, with an A/A control."""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from tunedgemm.backends.command import Command
from tunedgemm.cli.document import add_json
from tunedgemm.cli.flags import per_cent, positive_number
from tunedgemm.errors import UserError
from tunedgemm.process.paths import expanded

if TYPE_CHECKING:
    from tunedgemm.cli.ab_output import Output
    from tunedgemm.device import Device
    from tunedgemm.ops.op import Op
    from tunedgemm.shape import Shape

#: Turns of a command and of kernels, the threshold, and seconds of a run by default.
_TURNS, _ROUNDS, _THRESHOLD, _TIMEOUT = 10, 51, 0.01, 3600.0
#: An arm that is a variable.
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    arms = parser.add_argument_group("arms")
    add = arms.add_argument
    add("words", nargs="*", metavar="COMMAND", help="after --: a command that prints a number; without one, kernels are timed here")
    arm = "a table, or NAME=VALUE for a command; repeatable"
    add("--a", action="append", default=[], metavar="ARM", help=f"{arm}; default: the engines' plugin off, or torch's calls")
    add("--b", action="append", default=[], metavar="ARM", help=f"{arm}; default: the plugin on, or the configured tables")
    add("-i", "--input", default="", metavar="LIST", help="shapes whose kernels to time; default: those of the tables' rows")
    add("--op", default="", help="op of the list or the tables; default: by the files' columns and names")
    turns = parser.add_argument_group("turns")
    add = turns.add_argument
    add("--turns", type=positive_number, metavar="N", help=f"counted turns, at least 8 (default: {_TURNS}, of kernels {_ROUNDS})")
    number = "regular expression whose group is the number; default: standard output is one number"
    add("--number", default="", metavar="REGEX", help=number)
    add("--more-is-better", action="store_true", help="the number is a rate, such as tokens per second; default: a time")
    add("--timeout", type=_seconds, metavar="SECONDS", help=f"longest run of the command (default: {_TIMEOUT:g})")
    shown = parser.add_argument_group("output")
    add = shown.add_argument
    threshold = "exit 1 if B is slower by at least this, and the noise does not cover it (default: 1%%)"
    add("--threshold", type=per_cent, default=_THRESHOLD, metavar="PCT", help=threshold)
    add("-o", "--output", type=expanded, metavar="FILE", help="write the document of --json, after each turn")
    add_json(shown)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"expected seconds above 0 (got {text!r:.60})")
    return seconds


@attrs.frozen
class _Arm:
    """One arm: its tables and its variables."""

    tables: tuple[Path, ...] = ()
    variables: Mapping[str, str] = attrs.field(factory=dict)

    @classmethod
    def of(cls, texts: Sequence[str]) -> _Arm:
        """Parse the texts of a flag.

        Raises:
            UserError: a table does not exist.
        """
        from tunedgemm.table.folders import named_file

        variables = {match[1]: match[2] for text in texts if (match := _VARIABLE.fullmatch(text))}
        tables = tuple(named_file(text) for text in texts if not _VARIABLE.fullmatch(text))
        for path in tables:
            if not path.is_file():
                raise UserError(f"{path}: no such table; an arm is a table, or NAME=VALUE for a command")
        return cls(tables, variables)

    def environment(self, op: str) -> dict[str, str]:
        """Return its variables with those that name its tables."""
        from tunedgemm.analysis.results.files import op_of_table

        named: dict[str, list[str]] = {}
        for path in self.tables:
            named.setdefault(op_of_table(path, op).columns.variable, []).append(str(path.absolute()))
        return {**{name: os.pathsep.join(paths) for name, paths in named.items()}, **self.variables}


def _run(arguments: argparse.Namespace) -> int:
    from tunedgemm.analysis.ab import FEWEST_TURNS
    from tunedgemm.cli.ab_output import Output
    from tunedgemm.tuner import stopped_by_sigterm

    arms = _Arm.of(arguments.a), _Arm.of(arguments.b)
    turns = arguments.turns or (_TURNS if arguments.words else _ROUNDS)
    if turns < FEWEST_TURNS:
        raise UserError(f"--turns: must be at least {FEWEST_TURNS}, or no interval is known (got {turns})")
    output = Output(arguments.output, arguments.json, arguments.threshold, turns)
    with stopped_by_sigterm():
        return (_run_command if arguments.words else _run_kernels)(arguments, arms, output)


def _run_command(arguments: argparse.Namespace, arms: tuple[_Arm, _Arm], output: Output) -> int:
    from tunedgemm.analysis.ab import Arm, Failure, run_command, take_turns
    from tunedgemm.analysis.ab.turns import AGAIN, A, B
    from tunedgemm.integrations.health import SWITCHES
    from tunedgemm.tuner import Terminated

    if arguments.input:
        raise UserError("-i: lists kernels' shapes, and a command has its own; leave out one of them")
    _check_number(arguments.number)
    named = [arm.environment(arguments.op) for arm in arms]
    if not any(named):
        named = [dict.fromkeys(SWITCHES, text) for text in "01"]
    _refuse_equal({**os.environ, **named[0]} == {**os.environ, **named[1]} or _same_solutions(arms, arguments.op))
    both = {name: Arm(name, variables) for name, variables in zip((A, B), named, strict=True)}
    output.facts |= {"command": arguments.words, "arms": {name: arm.variables for name, arm in both.items()}}

    def run(name: str) -> float:
        return run_command(arguments.words, both[A if name == AGAIN else name], arguments.number, arguments.timeout or _TIMEOUT)

    try:
        output.end(take_turns(run, output.turns, more=arguments.more_is_better, keep=output.keep))
    except Failure as error:
        output.end(attrs.evolve(output.result, ended=str(error)))
        print("\n".join(f"  | {line}" for line in error.lines), file=sys.stderr)
        raise UserError(str(error)) from error
    except KeyboardInterrupt as stop:
        output.end(attrs.evolve(output.result, ended="interrupted"))
        return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)
    return int(output.result.exceeds(arguments.threshold))


def _check_number(pattern: str) -> None:
    try:
        groups = re.compile(pattern).groups if pattern else 1
    except re.error as error:
        raise UserError(f"--number: not a regular expression: {error} (got {pattern!r:.60})") from None
    if groups != 1:
        raise UserError(f"--number: needs one group, which is the number (got {groups} in {pattern!r:.60})")


def _refuse_equal(equal: bool) -> None:
    if equal:
        raise UserError("--a and --b: the arms are equal; name two tables, or another value for one")


def _same_solutions(arms: tuple[_Arm, _Arm], op: str) -> bool:
    """Tell whether two arms differ by tables alone, whose rows have the same solutions."""
    from tunedgemm.analysis.results.files import op_of_table
    from tunedgemm.table.csvfile import read_rows

    if not (arms[0].tables and arms[1].tables) or arms[0].variables != arms[1].variables:
        return False
    rows = [{(row.key, row.solution) for path in arm.tables for row in read_rows(path, op_of_table(path, op))[0]} for arm in arms]
    return rows[0] == rows[1]


def _run_kernels(arguments: argparse.Namespace, arms: tuple[_Arm, _Arm], output: Output) -> int:
    from tunedgemm.analysis.ab import compare_kernels
    from tunedgemm.cli.table.files import op_of
    from tunedgemm.table.folders import named_file

    tables = [path for arm in arms for path in arm.tables]
    listed = named_file(arguments.input) if arguments.input else None
    if any(arm.variables for arm in arms):
        raise UserError("--a and --b: NAME=VALUE is for a command; add one after --")
    for flag in ("number", "more_is_better", "timeout"):
        if getattr(arguments, flag):
            raise UserError(f"--{flag.replace('_', '-')}: is for a command; add one after --")
    if not tables and listed is None:
        raise UserError("ab: needs a command after --, tables (--a, --b), or a list of shapes (-i)")
    _refuse_equal(_same_solutions(arms, arguments.op))
    op = op_of(arguments, tables or [listed] if listed else tables)
    texts = [", ".join(map(str, arm.tables)) or what for arm, what in zip(arms, ("torch", "the configured tables"), strict=True)]
    output.facts |= {"op": op.name, "arms": dict(zip("ab", texts, strict=True))}
    found = compare_kernels(
        op, lambda device: _shapes(op, device, listed, tables), (arms[0].tables or None, arms[1].tables), output.turns, output.keep_shape
    )
    output.end(found.whole, found)
    if found.ended:
        return 128 + (signal.SIGTERM if found.ended == "SIGTERM" else signal.SIGINT)
    return int(found.whole.exceeds(arguments.threshold) or any(shape.failure for shape in found.shapes))


def _shapes(op: Op, device: Device, listed: Path | None, tables: Sequence[Path]) -> dict[Shape, int]:
    """Return the shapes of a list, or of the tables' rows for a device, with their calls."""
    from tunedgemm.analysis.compare.production import rows_for
    from tunedgemm.analysis.remeasure import captured_calls
    from tunedgemm.table.csvfile import read_rows
    from tunedgemm.tuner.plan import requested

    if listed is not None:
        return {untuned.shape: untuned.calls for untuned in requested(op, listed).on(op, device)}
    calls = captured_calls(op)
    rows = [row for path in tables for row in rows_for(device, read_rows(path, op)[0]) if row.shape.m]
    return {row.shape: calls.get(row.shape, 1) for row in rows}


command = Command("ab", "run two arms in turns: a command with and without the plugin, two tables, or kernels", _add_arguments, _run)
