# PYTHON_ARGCOMPLETE_OK
"""``tunedgemm``: one file a subcommand, and the entry points of the group ``tunedgemm.commands``.

A command prints its result to stdout. A usage error prints one line to stderr with exit code 2;
output that cannot be written does so with exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import io
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast

import attrs

from tunedgemm.backends.command import Command
from tunedgemm.cli.output import Output, OutputError, give_up_output
from tunedgemm.errors import UserError
from tunedgemm.process.plugin_guard import attempt, entry_points, load, load_extra
from tunedgemm.text.printable import PrintableStream, printable_line
from tunedgemm.version import __version__

GROUP = "tunedgemm.commands"
#: Commands of extras -> their help line.
OF_EXTRAS = {"report": "write the results of tuning as one HTML page: gains, roofline, candidates, cost"}


class _Parser(argparse.ArgumentParser):
    """A parser with one-line errors that adds a command's late arguments while parsing."""

    late: Callable[[argparse.ArgumentParser, Sequence[str]], None] | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the parsed arguments and the unknown words."""
        late, self.late = self.late, None
        if late is not None:
            late(self, args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; `{self.prog} --help` lists the options")


class _StandardError(logging.StreamHandler[TextIO]):
    """Log handler on the current `sys.stderr`, which a live display replaces."""

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        pass


def commands() -> list[Command]:
    """Import the commands of the core."""
    from tunedgemm.cli import ab, bits, coverage, doctor, explain, new_plugin, plugins, shapes, table, tune

    return [module.command for module in (ab, bits, coverage, doctor, explain, new_plugin, plugins, shapes, table, tune)]


def _load_plugin_command(entry: EntryPoint, wanted: str) -> Command:
    """Import a plugin's command if it is *wanted*; else return a stub with its name and owner.

    Raises:
        UserError: the command cannot be imported.
    """
    if entry.name != wanted:
        owner = entry.dist.name if entry.dist else entry.value
        return Command(entry.name, OF_EXTRAS.get(entry.name, f"commands of {owner}"), lambda _: None, lambda _: 0)
    loaded, fault = load(entry)
    if fault or not isinstance(loaded, Command):
        raise UserError(f"command {entry.name!r} of {entry.value}: cannot be loaded: {fault or f'it is not a Command (got {loaded!r})'}")
    return attrs.evolve(loaded, name=entry.name, add_arguments=lambda parser: _add_plugin_arguments(loaded, entry, parser))


def _add_plugin_arguments(command: Command, entry: EntryPoint, parser: argparse.ArgumentParser) -> None:
    _, fault = attempt(command.add_arguments, parser)
    if fault:
        raise UserError(f"command {entry.name!r} of {entry.value}: its arguments cannot be added: {fault}")


def _require(name: str, wanted: str, _: argparse.ArgumentParser) -> None:
    """Raise UserError with the remedy if the *wanted* command's distribution is missing."""
    if name == wanted:
        load_extra(GROUP, name, f"command {name!r}")


def parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Build the parser of the whole command line; import a plugin only for the command in *words*."""
    top = _Parser(prog="tunedgemm", description="Tune GEMMs over every installed backend and dispatch to the winners.")
    top.add_argument("--version", action="version", version=f"tunedgemm {__version__}")
    choices = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    wanted = next((word for word in words if not word.startswith("-")), "")
    by_name = {command.name: command for command in commands()}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        if entry.name in by_name:
            print(f"tunedgemm: command {entry.name!r} of {entry.value}: left out: its name is taken", file=sys.stderr)
        else:
            by_name[entry.name] = _load_plugin_command(entry, wanted)
    for name, text in OF_EXTRAS.items():
        absent = Command(name, f"{text}; needs tunedgemm[{name}]", functools.partial(_require, name, wanted), lambda _: 0)
        by_name.setdefault(name, absent)
    for command in by_name.values():
        sub = choices.add_parser(command.name, help=command.help, description=command.help)
        sub.add_argument("-v", "--verbose", action="store_true", help="also print skipped shapes, every solution's status, full errors")
        command.add_arguments(sub)
        sub.late = command.add_late
        sub.set_defaults(run=command.run)
    return top


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; an error for unknown words names the help of the command."""
    words = sys.argv[1:] if argv is None else argv
    arguments, unknown = parser(words).parse_known_args(words)
    if unknown:
        raise UserError(f"unrecognized arguments: {' '.join(unknown)}; `tunedgemm {arguments.command} --help` lists the options")
    return arguments


def _open_streams() -> None:
    """Prepare standard output and error for any text.

    Closed streams (``>&-``), which Python sets to None, go to the null device. Characters that the
    encoding lacks are escaped.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        elif stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  # open until the process ends


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0, 1 if a part of the work failed, or 2 for a usage error."""
    _open_streams()
    if "_ARGCOMPLETE" in os.environ:  # the shell asks for the words that fit at the cursor
        from tunedgemm.cli.completion import complete

        complete(parser)
    with contextlib.redirect_stderr(cast(TextIO, PrintableStream(sys.stderr))):
        return _run(argv)


def _run(argv: Sequence[str] | None) -> int:
    verbose = False
    try:
        output = Output(sys.stdout)
        with contextlib.redirect_stdout(cast(TextIO, PrintableStream(cast(TextIO, output)))):
            logging.basicConfig(level=logging.WARNING, format="tunedgemm: %(message)s", handlers=[_StandardError()])
            try:
                arguments = _parse(argv)
            except SystemExit:  # of --help and --version
                output.settle()
                raise
            verbose = arguments.verbose
            if verbose:
                logging.getLogger().setLevel(logging.INFO)
            code: int = arguments.run(arguments)
            sys.stdout.flush()
    except UserError as error:
        if verbose:
            logging.getLogger("tunedgemm").exception("the error came from here")
        print(f"tunedgemm: error: {printable_line(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tunedgemm: interrupted", file=sys.stderr)
        return 130
    except OutputError as error:
        give_up_output(error)
        return 0 if error.errno == errno.EPIPE else 1
    except OSError as error:
        if verbose:
            logging.getLogger("tunedgemm").exception("the error came from here")
        named = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
        print(f"tunedgemm: error: {named}{error.strerror or error}", file=sys.stderr)
        return 2
    return code
