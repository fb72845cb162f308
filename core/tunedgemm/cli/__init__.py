"""``tunedgemm``: one file a subcommand in this folder, and those of the entry point group ``tunedgemm.commands``.

A command prints its result to standard output. Users' mistakes print one line to standard error, exit code 2.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import pkgutil
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import NoReturn, TextIO

from tunedgemm import __version__
from tunedgemm.command import Command
from tunedgemm.errors import UserError

GROUP = "tunedgemm.commands"


class _Parser(argparse.ArgumentParser):
    """Mistakes as one line, like all others, in place of the whole usage."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; `{self.prog} --help` lists what there is")


class _StandardError(logging.StreamHandler[TextIO]):
    """Logs to what `sys.stderr` is at the time: a live display puts itself there to keep its place at the bottom."""

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        pass


def commands() -> list[Command]:
    """Our own commands by file name, then plugins'; one that cannot be imported is named on standard error."""
    found = []
    for module in pkgutil.iter_modules(__path__):
        found.append(importlib.import_module(f"{__name__}.{module.name}").command)
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            found.append(entry.load())
        except Exception as error:  # a plugin's import may raise anything
            print(f"tunedgemm: command {entry.name!r} of {entry.value} left out: {type(error).__name__}: {error}", file=sys.stderr)
    return found


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    top = _Parser(prog="tunedgemm", description="Tune GEMMs over every installed backend and dispatch to the winners.")
    top.add_argument("--version", action="version", version=f"tunedgemm {__version__}")
    choices = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in commands():
        sub = choices.add_parser(command.name, help=command.help, description=command.help)
        sub.add_argument("-v", "--verbose", action="store_true", help="say more: skipped shapes, every solution's status, full errors")
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    return top


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; what is not understood names the help of the command, which has it, not that of the whole."""
    arguments, unknown = parser().parse_known_args(argv)
    if unknown:
        raise UserError(f"unrecognized arguments: {' '.join(unknown)}; `tunedgemm {arguments.command} --help` lists what there is")
    return arguments


def _open_streams() -> None:
    """Give output that the caller has closed (``>&-``) to nobody; Python leaves None in its place."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  # as long as the process


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 where a part of the work failed, 2 for a user's mistake."""
    verbose = False
    try:
        _open_streams()
        arguments = _parsed(argv)
        verbose = arguments.verbose
        level = logging.INFO if verbose else logging.WARNING
        logging.basicConfig(level=level, format="tunedgemm: %(message)s", handlers=[_StandardError()])
        code: int = arguments.run(arguments)
    except UserError as error:
        if verbose:
            logging.getLogger("tunedgemm").exception("the error came from here")
        print(f"tunedgemm: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tunedgemm: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `tunedgemm table show | head`
        sys.stderr.close()
        return 0
    return code
