"""Shell completion by argcomplete, if it is installed (``pip install tunedgemm[completion]``).

The shell runs ``tunedgemm`` with ``_ARGCOMPLETE`` and reads the words that fit. Subcommands, flags
and choices come from the parsers, files from the shell.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Sequence

from tunedgemm.errors import UserError

#: Words that a metavar lists, as in ``cold|hot``.
_WORDS = re.compile(r"[a-z_]+(\|[a-z_]+)+")


def complete(parser: Callable[[Sequence[str]], argparse.ArgumentParser]) -> None:
    """Answer the shell and end the process; without argcomplete, or the command, without an answer.

    Args:
        parser: makes the parser of a command line.
    """
    try:
        import argcomplete
    except ImportError:
        os._exit(1)
    line, point = os.environ.get("COMP_LINE", ""), os.environ.get("COMP_POINT", "")
    words = line[: int(point) if point.isdecimal() else None].split()[1:]
    try:
        top = parser(words)
    except UserError:  # running the command says why it cannot be loaded
        os._exit(1)
    add_completers(top)
    argcomplete.autocomplete(top)


def add_completers(parser: argparse.ArgumentParser) -> None:
    """Set the completers of the values that a parser and its subcommands take."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                add_completers(sub)
        elif "--libtype" in action.option_strings:
            action.completer = _libtypes  # type: ignore[attr-defined]  # argcomplete reads it
        elif "--op" in action.option_strings:
            action.completer = _ops  # type: ignore[attr-defined]
        elif isinstance(action.metavar, str) and _WORDS.fullmatch(action.metavar):
            words = action.metavar.split("|")
            action.completer = lambda words=words, **_: words  # type: ignore[attr-defined]


def _ops(**_: object) -> list[str]:
    from tunedgemm.ops import ops

    return sorted(ops())


def _libtypes(prefix: str, **_: object) -> list[str]:
    """Return the installed libtypes, after those that a comma list has already."""
    from tunedgemm.backends.registry import Registry
    from tunedgemm.libtypes import ALL

    listed, comma, _word = prefix.rpartition(",")
    names = Registry().libtypes
    return [f"{listed},{name}" for name in names if name not in listed.split(",")] if comma else [ALL, *names]
