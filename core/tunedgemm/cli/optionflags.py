"""Flags of backends' options, grouped by plugin in a command's help, and their variables."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

from tunedgemm.backends.backend import Backend
from tunedgemm.backends.option import Option
from tunedgemm.backends.registry import Registry
from tunedgemm.errors import UserError
from tunedgemm.libtypes import listed
from tunedgemm.process.plugin_guard import described

#: Attribute of the parsed arguments with the values of the flags: variable -> value.
_VARIABLES = "variables"


class _StoreVariable(argparse.Action):
    """Stores a value under a variable's name."""

    def __init__(self, *words: Any, variable: str, **more: Any) -> None:
        super().__init__(*words, **more)
        self.variable = variable

    def __call__(self, _: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, __: str | None = None) -> None:
        setattr(namespace, _VARIABLES, {**getattr(namespace, _VARIABLES), self.variable: value})


def add_options(parser: argparse.ArgumentParser, libtype: str = "all", registry: Registry | None = None) -> list[str]:
    """Load the backends of a ``--libtype`` text and define their flags; equal options share one flag.

    A flag that exists, or that a higher-ranked backend defines differently, is skipped, so that
    installing a plugin does not change a command. Its variable still works.

    Returns:
        A line for each skipped flag, with the reason.
    """
    registry = registry or Registry()
    named = listed(libtype)
    answers = [registry.get(name) for name in registry.libtypes if not named or name in named]
    stated: dict[Option, list[Backend]] = {}
    for backend in (answer for answer in answers if isinstance(answer, Backend)):  # the run reports the faults of the others
        for option in backend.options:
            stated.setdefault(option, []).append(backend)
    parser.set_defaults(**{_VARIABLES: {}})
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
            owner = owners.get(option.flag, "tunedgemm itself")
            fault = f"flag {option.flag} of {_named(backends)}: left out: {owner} has one of that name"
            left_out.append(f"{fault}; set {option.variable} instead")
        else:
            owners[option.flag] = _named(backends)
    return left_out


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    """Add an option's flag; raises argparse.ArgumentError if the parser has it already."""
    otherwise = f", else {option.default}" if option.default else ""
    text = f"{option.help}; default: {option.variable}{otherwise}".replace("%", "%%")
    metavar = None if option.choices else option.flag.rpartition("-")[2].upper()

    group.add_argument(
        option.flag, action=_StoreVariable, variable=option.variable, dest=_VARIABLES, type=functools.partial(_value, option),
        choices=option.choices or None, metavar=metavar, help=text,
    )  # fmt: skip


def _value(option: Option, text: str) -> str:
    """Return the value of an option for a text.

    Raises:
        UserError: `Option.kind` returned no text, or raised what argparse does not expect.
    """
    try:
        value = option.kind(text)
    except (argparse.ArgumentTypeError, TypeError, ValueError, UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a plugin may raise anything
        raise UserError(f"{option.flag} {text!r}: its kind() raised {described(error)}") from error
    if not isinstance(value, str):
        raise UserError(f"{option.flag} {text!r}: its kind() must return text (got {value!r})")
    return value


def _named(backends: Sequence[Backend]) -> str:
    libtypes = ", ".join(backend.libtype for backend in backends)
    return (
        f"backend{'s' if len(backends) > 1 else ''} {libtypes} ({', '.join(dict.fromkeys(backend.distribution for backend in backends))})"
    )


@contextlib.contextmanager
def option_variables(arguments: argparse.Namespace) -> Iterator[None]:
    """Set the variables of the flags of `add_options` for this process and its children, inside the block."""
    variables: dict[str, str] = getattr(arguments, _VARIABLES)
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
