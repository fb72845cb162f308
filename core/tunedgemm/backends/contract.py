"""Checks of what a plugin's `Backend` states, and of its hooks."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, Protocol

import attrs
import pluggy

from tunedgemm.backends import hookspecs
from tunedgemm.errors import PluginError
from tunedgemm.libtypes import ALIASES, ALL, GROUPS, STAND_INS
from tunedgemm.ops.scale_order import E8M0_ORDERS, MX_ORDERS, ORDERS

HOOKS = tuple(name for name, value in vars(hookspecs).items() if hasattr(value, "tunedgemm_spec"))
REQUIRED = ("supports", "enumerate_solutions")
#: The form of AITER's libtypes, in tables and in ``--libtype``.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*", re.ASCII)
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*", re.ASCII)
#: Attribute of a function that `hookspecs.hookimpl` has marked.
_MARK = f"{hookspecs.hookimpl.project_name}_impl"
_ORDERS = tuple(dict.fromkeys((*ORDERS, *E8M0_ORDERS, *MX_ORDERS)))


class Stated(Protocol):
    """The fields of a backend that the checks of other fields read."""

    @property
    def libtype(self) -> str:
        """Return the libtype."""

    @property
    def ops(self) -> tuple[str, ...]:
        """Return the names of the ops."""


def check_libtype(_: Stated, __: attrs.Attribute[str], libtype: str) -> None:
    """Raise PluginError for a libtype that a table or ``--libtype`` cannot name."""
    if not (isinstance(libtype, str) and _NAME.fullmatch(libtype)):
        raise PluginError(f"libtype {libtype!r}: must be letters, digits, '_', '.' and '-'; rename the entry point")
    if libtype in (ALL, *GROUPS, *ALIASES, *STAND_INS):
        raise PluginError(f"libtype {libtype!r}: has another meaning in --libtype or in tables; rename the entry point")


def check_contract(backend: Stated, _: attrs.Attribute[int], contract: int) -> None:
    """Raise PluginError for another contract than this core's."""
    if contract != hookspecs.CONTRACT or isinstance(contract, bool):
        remedy = "install the versions of both that belong together"
        raise PluginError(f"libtype {backend.libtype!r}: contract must be {hookspecs.CONTRACT} (got {contract!r}); {remedy}")


def tuple_of(kind: type[Any]) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """Return a validator of a tuple of different values of one class."""
    what = "names" if kind is str else f"values of tunedgemm.plugin.{kind.__name__}"

    def check(backend: Stated, field: attrs.Attribute[Any], values: Any) -> None:
        if not isinstance(values, tuple) or not all(isinstance(value, kind) for value in values) or len(set(values)) < len(values):
            remedy = f"write ({values!r},)" if isinstance(values, kind) else "write a tuple without repetitions"
            raise PluginError(f"libtype {backend.libtype!r}: {field.name} must be a tuple of {what} (got {values!r}); {remedy}")

    return check


def check_ops(backend: Stated, _: attrs.Attribute[Any], covered: tuple[str, ...]) -> None:
    """Raise PluginError for a backend without ops."""
    if not covered:
        from tunedgemm.ops import ops

        raise PluginError(f"libtype {backend.libtype!r}: ops must name at least one op (got none); choose from {', '.join(ops())}")


def check_platforms(backend: Stated, _: attrs.Attribute[Any], platforms: tuple[Any, ...]) -> None:
    """Raise PluginError where the platforms together do not name each covered op and no others.

    Ranked ops must be among those of their platform.
    """
    named = {op for platform in platforms for op in platform.ops or backend.ops}
    if platforms and (wrong := sorted(named ^ set(backend.ops))):
        raise PluginError(f"libtype {backend.libtype!r}: platforms and ops must name the same ops (differ in {', '.join(wrong)})")
    for platform in platforms:
        if wrong := sorted({name.partition(":")[0] for name in platform.ranked} - set(platform.ops or backend.ops)):
            raise PluginError(f"libtype {backend.libtype!r}: ranked must be among the ops of its platform (got {', '.join(wrong)})")


def check_options(backend: Stated, _: attrs.Attribute[Any], options: tuple[Any, ...]) -> None:
    """Raise PluginError where two options have one flag."""
    flags = [option.flag for option in options]
    if twice := sorted({flag for flag in flags if flags.count(flag) > 1}):
        raise PluginError(f"libtype {backend.libtype!r}: options state {', '.join(twice)} more than once")


def check_rows(backend: Stated, _: attrs.Attribute[Any], rows: tuple[str, ...]) -> None:
    """Raise PluginError for a row that is not ``op:libtype`` of a covered op and another libtype."""
    for row in rows:
        op, other = row.partition(":")[::2]
        if op not in backend.ops or other in ("", backend.libtype):
            raise PluginError(f"libtype {backend.libtype!r}: rows must be op:libtype of its ops and other libtypes (got {row!r})")


def check_orders(backend: Stated, _: attrs.Attribute[Any], orders: tuple[str, ...]) -> None:
    """Raise PluginError for an unknown order of scales."""
    if unknown := [order for order in orders if order not in _ORDERS]:
        raise PluginError(f"libtype {backend.libtype!r}: scale_orders must be among {', '.join(_ORDERS)} (got {unknown[0]!r})")


def check_variables(backend: Stated, _: attrs.Attribute[Any], variables: tuple[str, ...]) -> None:
    """Raise PluginError for a name that is not capitals, digits and '_'."""
    if wrong := [name for name in variables if not _VARIABLE.fullmatch(name)]:
        raise PluginError(f"libtype {backend.libtype!r}: variables must be names of capitals, digits and '_' (got {wrong[0]!r})")


class _HookManager(pluggy.PluginManager):
    """Look for hooks without running code: pluggy below 1.7 evaluates an object's properties, too."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> pluggy.HookimplOpts | None:
        """Return the options of a marked function or method, else None."""
        found = _stored(plugin, name)
        function = getattr(found, "__func__", found)
        if not inspect.isfunction(function):
            return None
        options: pluggy.HookimplOpts | None = getattr(found, _MARK, getattr(function, _MARK, None))
        return options


def _stored(hooks: object, name: str) -> Any:
    """Return an attribute before it is bound, None for an absent one; reading a slot runs no code."""
    found = inspect.getattr_static(hooks, name, None)
    if not inspect.ismemberdescriptor(found):
        return found
    try:
        return found.__get__(hooks)  # getattr() would ask __getattr__ for the value of an empty slot
    except AttributeError:
        return None


def bound_hooks(libtype: str, hooks: object) -> dict[str, Callable[..., Any]]:
    """Return the hooks of an object as functions of positional arguments.

    Raises:
        PluginError: a hook is unknown, missing, not marked, or has other arguments.
    """
    manager = _HookManager("tunedgemm")
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(hooks, name=libtype)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginError(f"libtype {libtype!r}: {' '.join(str(error).split())}") from error
    found = {call.name: call.get_hookimpls() for call in manager.get_hookcallers(hooks) or ()}
    bound = {name: _positional(libtype, name, found[name][0].function) for name in HOOKS if name in found}
    if unmarked := [name for name in _public_functions(hooks) if name not in bound]:
        remedy = f"mark it with hookimpl; the hooks are {', '.join(HOOKS)}; begin other names with '_'"
        raise PluginError(f"libtype {libtype!r}: {unmarked[0]}() is public and no hook; {remedy}")
    if wrong := [name for name in HOOKS if name not in bound and _defines(hooks, name)]:
        kind = type(_stored(hooks, wrong[0])).__name__
        raise PluginError(f"libtype {libtype!r}: {wrong[0]} must be a function marked with hookimpl (got a {kind}); wrap it in one")
    missing = [name for name in REQUIRED if name not in bound] + ([] if "run" in bound or "bind" in bound else ["run"])
    if missing:
        raise PluginError(f"libtype {libtype!r}: lacks the hook {missing[0]}(); implemented: {', '.join(bound) or 'none'}")
    return bound


def _public_functions(hooks: object) -> list[str]:
    """Return the public functions that a module or the classes of an object define."""
    if inspect.ismodule(hooks):
        own = {name: value for name, value in vars(hooks).items() if getattr(value, "__module__", "") == hooks.__name__}
    else:
        own = {name: value for kind in reversed(type(hooks).__mro__[:-1]) for name, value in vars(kind).items()}
    return [name for name, value in own.items() if not name.startswith("_") and inspect.isfunction(getattr(value, "__func__", value))]


def _defines(hooks: object, name: str) -> bool:
    """Return whether an object has an attribute; of a module's, whether it is marked or not imported."""
    value = _stored(hooks, name)
    return value is not None and (
        not inspect.ismodule(hooks) or hasattr(value, _MARK) or getattr(value, "__module__", "") == hooks.__name__
    )


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
