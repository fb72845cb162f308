"""Command: one subcommand of ``tunedgemm``; plugins contribute theirs by the group ``tunedgemm.commands``."""

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
        add_late: adds what is slow to find out, for the words after the command's; called when the
            command is the one whose arguments are parsed, or whose help is asked for.
    """

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    add_late: Callable[[argparse.ArgumentParser, Sequence[str]], None] | None = None
