"""Checks what a plugin's object states against the contract, and guards its functions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pluggy

from tunedgemm.backends import hookspecs, split
from tunedgemm.backends.hookspecs import CONTRACT
from tunedgemm.backends.option import Option
from tunedgemm.backends.platforms import Platform
from tunedgemm.device import Device
from tunedgemm.errors import PluginError
from tunedgemm.libtypes import ALIASES, ALL, GROUPS, STAND_INS
from tunedgemm.process.foreign import attempt
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported
from tunedgemm.text.cell import RULE, is_kept
from tunedgemm.text.printable import warn_once

_Value = TypeVar("_Value")

HOOKS = ("supports", "enumerate_solutions", "run", "heuristic_fallback", "bind", "prepare", "refine")
#: The form of AITER's libtypes, in tables and in ``--libtype``.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*", re.ASCII)
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*", re.ASCII)


def check_name(libtype: str) -> None:
    """Raise PluginError for a libtype that a table or ``--libtype`` cannot name."""
    if not _NAME.fullmatch(libtype):
        raise PluginError(f"libtype {libtype!r}: must be letters, digits, '_', '.' and '-'; rename the entry point")
    if libtype in (ALL, *GROUPS, *ALIASES, *STAND_INS):
        raise PluginError(f"libtype {libtype!r}: has another meaning in --libtype or in tables; rename the entry point")


def bound_hooks(libtype: str, plugin: object) -> dict[str, Callable[..., Any]]:
    """Return the hooks of a plugin as functions of positional arguments.

    Raises:
        PluginError: the plugin was written for another contract, or a hook is unknown, missing or
            has other arguments.
    """
    contract = getattr(plugin, "CONTRACT", CONTRACT)
    if contract != CONTRACT:
        raise PluginError(f"written for contract {contract}; this core knows {CONTRACT}")
    manager = pluggy.PluginManager("tunedgemm")
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(plugin, name=libtype)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginError(f"libtype {libtype!r}: {' '.join(str(error).split())}") from error
    hooks = {}
    for name in HOOKS:
        for implementation in getattr(manager.hook, name).get_hookimpls():
            hooks[name] = _positional(libtype, name, implementation.function)
    missing = [name for name in ("supports", "enumerate_solutions") if name not in hooks]
    missing += [] if "run" in hooks or "bind" in hooks else ["run"]
    if missing:
        raise PluginError(f"libtype {libtype!r}: lacks the hook {missing[0]}(); implemented: {', '.join(hooks) or 'none'}")
    return hooks


def stated_names(libtype: str, plugin: object, attribute: str) -> tuple[str, ...]:
    """Return the names that an attribute of a plugin lists; () without it.

    Raises:
        PluginError: it is not a tuple or list of texts.
    """
    stated = getattr(plugin, attribute, ())
    if not isinstance(stated, tuple | list) or not all(isinstance(name, str) for name in stated):
        remedy = f"write ({stated!r},)" if isinstance(stated, str) else "write a tuple"
        raise PluginError(f"libtype {libtype!r}: {attribute} must be a tuple of names (got {stated!r}); {remedy}")
    return tuple(stated)


def stated_variables(libtype: str, plugin: object, options: tuple[Option, ...]) -> tuple[str, ...]:
    """Return the environment variables that a plugin reads: those of ``VARIABLES`` and of its options.

    Raises:
        PluginError: a name is not capitals, digits and '_'.
    """
    variables = stated_names(libtype, plugin, "VARIABLES")
    for name in variables:
        if not _VARIABLE.fullmatch(name):
            raise PluginError(f"libtype {libtype!r}: VARIABLES must be names of capitals, digits and '_' (got {name!r})")
    return tuple(dict.fromkeys((*variables, *(option.variable for option in options))))


def stated_rows(libtype: str, plugin: object, covered: tuple[str, ...]) -> tuple[str, ...]:
    """Validate the plugin's ``ROWS``: ops that it covers, with other libtypes.

    Raises:
        PluginError: an entry is not ``op:libtype``, or names another op or its own libtype.
    """
    rows = stated_names(libtype, plugin, "ROWS")
    for row in rows:
        op, _, other = row.partition(":")
        if op not in covered or other in ("", libtype):
            raise PluginError(f"libtype {libtype!r}: ROWS must be op:libtype of its OPS and other libtypes (got {row!r})")
    return rows


def stated_options(libtype: str, stated: object) -> tuple[Option, ...]:
    """Validate the plugin's ``OPTIONS``."""
    options = _stated_values(libtype, "OPTIONS", stated, Option)
    if twice := {option.flag for option in options if sum(other.flag == option.flag for other in options) > 1}:
        raise PluginError(f"libtype {libtype!r}: OPTIONS state {', '.join(sorted(twice))} more than once")
    return options


def stated_platforms(libtype: str, stated: object, covered: tuple[str, ...]) -> tuple[Platform, ...]:
    """Validate the plugin's ``PLATFORMS``: together they name each of the *covered* ops and no others."""
    platforms = _stated_values(libtype, "PLATFORMS", stated, Platform)
    named = {op for platform in platforms for op in platform.ops or covered}
    if platforms and (wrong := sorted(named ^ set(covered))):
        raise PluginError(f"libtype {libtype!r}: PLATFORMS and OPS must name the same ops (differ in {', '.join(wrong)})")
    return platforms


def _stated_values(libtype: str, attribute: str, stated: object, kind: type[_Value]) -> tuple[_Value, ...]:
    """Return the values that an attribute of a plugin lists, or its single one."""
    values = tuple(stated) if isinstance(stated, tuple | list) else (stated,)
    for value in values:
        if not isinstance(value, kind):
            raise PluginError(f"libtype {libtype!r}: {attribute} must be values of tunedgemm.plugin.{kind.__name__} (got {value!r})")
    return values


def _positional(libtype: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function to take all of the hook's arguments by position."""
    spec_parameters = list(inspect.signature(getattr(hookspecs, name)).parameters)
    hook_parameters = inspect.signature(function).parameters
    for parameter in hook_parameters.values():
        fault = "" if parameter.name in spec_parameters else f"is not one of {', '.join(spec_parameters)}"
        fault = fault or ("" if parameter.default is parameter.empty else "may not have a default")
        if fault:
            written = str(parameter).split("=")[0].split(":")[0]
            raise PluginError(f"libtype {libtype!r}: hook {name}{inspect.signature(function)}: {written!r} {fault}")
    if list(hook_parameters) == spec_parameters:
        return function
    positions = [spec_parameters.index(argument) for argument in hook_parameters]
    return lambda *arguments: function(*(arguments[position] for position in positions))


def guarded_version(libtype: str, function: Callable[..., str] | None) -> Callable[..., str]:
    """Wrap the plugin's library_version as `guarded_text`; a text that tables cannot keep is unknown, too."""
    guarded = guarded_text(function)

    def checked(*arguments: Any) -> str:
        version = guarded(*arguments).strip()
        if is_kept(version):
            return version
        warn_once(f"libtype {libtype!r}: library_version() must be {RULE} (got {version!r:.80}); its rows have none")
        return ""

    return checked


def guarded_text(function: Callable[..., str] | None) -> Callable[..., str]:
    """Wrap the plugin's function; return "" where it is missing, fails or returns anything but text."""

    def text(*arguments: Any) -> str:
        answer = function(*arguments) if function is not None else ""
        return answer if isinstance(answer, str) else ""

    def guarded(*arguments: Any) -> str:
        return attempt(text, *arguments)[0] or ""

    return guarded


def about_kernels(libtype: str, plugin: object, name: str) -> Callable[[Solution, Shape, Device], str]:
    """Wrap the plugin's function, if any, to ask about the kernel alone where a bias is added after it."""
    if not hasattr(plugin, name):
        return getattr(hookspecs, name)  # type: ignore[no-any-return]
    guarded = guarded_text(_positional(libtype, name, getattr(plugin, name)))

    def asked(solution: Solution, shape: Shape, device: Device) -> str:
        whole = split.kernel_and_shape(solution, shape)
        return whole.reason if isinstance(whole, Unsupported) else guarded(*whole, device)

    return asked


def guarded_details(details: Callable[[Device], Iterable[str]] | None) -> Callable[[Device], tuple[str, ...]]:
    """Wrap the plugin's function; return one line with the reason where it fails."""

    def lines(device: Device) -> tuple[str, ...]:
        return tuple(" ".join(str(line).splitlines()) for line in (details(device) if details is not None else ()))

    def guarded(device: Device) -> tuple[str, ...]:
        answer, fault = attempt(lines, device)
        return (f"its details() raised {fault}",) if fault else answer

    return guarded
