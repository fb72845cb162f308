"""Command: one subcommand of ``tunedgemm``; plugins add theirs by the group ``tunedgemm.commands``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import attrs


@attrs.frozen
class Command:
    """One subcommand.

    Attributes:
        name: name of the subcommand and of a plugin's entry point.
        help: one line for the list of commands.
        add_arguments: adds arguments to the parser.
        run: runs the command with the parsed arguments and returns the exit code.
        add_late: adds arguments that are slow to compute, given the remaining words; called only
            when this command is parsed or its help is printed.
    """

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    add_late: Callable[[argparse.ArgumentParser, Sequence[str]], None] | None = None
