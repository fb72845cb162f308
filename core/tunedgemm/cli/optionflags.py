"""Flags of backends' options: in the help of a command a group for each plugin, and the variables that they say."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from tunedgemm.backends.option import Option
from tunedgemm.backends.registry import Backend, Registry

#: Where the parsed arguments have what flags say: variable -> value.
_SAID = "variables"


class _Say(argparse.Action):
    """Notes a value under a variable's name."""

    def __init__(self, *words: Any, variable: str, **more: Any) -> None:
        super().__init__(*words, **more)
        self.variable = variable

    def __call__(self, _: argparse.ArgumentParser, found: argparse.Namespace, value: Any, __: str | None = None) -> None:
        setattr(found, _SAID, {**getattr(found, _SAID), self.variable: value})


def add_options(parser: argparse.ArgumentParser, libtype: str = "all", registry: Registry | None = None) -> list[str]:
    """Define the flags of the backends of a ``--libtype`` text, which loads those; an option that several state alike is one flag.

    A flag that the parser has, or that a backend of an earlier rank states otherwise, is left out:
    nothing that a user typed before a plugin was installed changes its meaning, and the plugin's
    variable holds all the same.

    Returns:
        What is left out and why, a line each.
    """
    registry = registry or Registry()
    named = {text.strip() for text in libtype.split(",")}
    answers = [registry.get(known) for known in registry.libtypes if "all" in named or known in named]
    stated: dict[Option, list[Backend]] = {}
    for backend in (answer for answer in answers if isinstance(answer, Backend)):  # the run says what is wrong with the others
        for option in backend.options:
            stated.setdefault(option, []).append(backend)
    parser.set_defaults(**{_SAID: {}})
    groups: dict[tuple[str, ...], argparse._ArgumentGroup] = {}
    owners: dict[str, str] = {}
    left_out = []
    for option, backends in stated.items():
        libtypes = tuple(backend.libtype for backend in backends)
        if libtypes not in groups:
            groups[libtypes] = parser.add_argument_group(_named(backends))
        try:
            _add(groups[libtypes], option)
        except argparse.ArgumentError:
            theirs = owners.get(option.flag, "tunedgemm itself")
            told = f"the flag {option.flag} of {_named(backends)} is left out: {theirs} has one of that name"
            left_out.append(f"{told}; {option.variable} in the environment says the same")
        else:
            owners[option.flag] = _named(backends)
    return left_out


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    """Raises argparse.ArgumentError where the parser has the flag already."""
    otherwise = f", else {option.default}" if option.default else ""
    said = f"{option.help}; default: {option.variable}{otherwise}".replace("%", "%%")
    metavar = None if option.choices else option.flag.rpartition("-")[2].upper()
    group.add_argument(
        option.flag, action=_Say, variable=option.variable, dest=_SAID, type=option.kind, choices=option.choices or None,
        metavar=metavar, help=said,
    )  # fmt: skip


def _named(backends: Sequence[Backend]) -> str:
    libtypes = ", ".join(backend.libtype for backend in backends)
    return f"backend{'s' if len(backends) > 1 else ''} {libtypes} ({', '.join(dict.fromkeys(each.distribution for each in backends))})"


@contextlib.contextmanager
def said(arguments: argparse.Namespace) -> Iterator[None]:
    """A block in which this process, and those that it starts, have the variables that the flags of `add_options` say."""
    variables: dict[str, str] = getattr(arguments, _SAID)
    before = {variable: os.environ.get(variable) for variable in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for variable, value in before.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value
