"""Command: one subcommand of ``tunedgemm``; plugins add theirs by the group ``tunedgemm.commands``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import attrs


@attrs.frozen
class Command:
    """One subcommand.

    Attributes:
        name: the word after ``tunedgemm``; a plugin's entry point has the same name.
        help: one line for the list of commands.
        add_arguments: fills the command's parser.
        run: does the work from the parsed arguments and returns the exit code.
        add_late: adds arguments that are slow to compute, given the words after the command's;
            called only when this command's arguments are parsed or its help is printed.
    """

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    add_late: Callable[[argparse.ArgumentParser, Sequence[str]], None] | None = None
