"""Modules with AITER's names, for code that imports from ``aiter`` where AITER is not installed.

`install` puts modules into `sys.modules`; their names are looked up in `tunedgemm` at the first
use. A name of AITER's that this project lacks raises AttributeError, or ImportError in an import
statement, with the missing name.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import operator
import sys
import types
from importlib import metadata
from importlib.machinery import ModuleSpec
from typing import Any

from tunedgemm.plugin import UserError

from tunedgemm_aiter_names.names import ALIASES, NAME, PLUGINS, SERVED
from tunedgemm_aiter_names.unserved import reason


class _ServedModule(types.ModuleType):
    """A module with the names of `SERVED`."""

    def __init__(self, name: str) -> None:
        super().__init__(name, f"AITER's names that tunedgemm serves: {', '.join(sorted(SERVED[name])) or 'those of its modules'}.")
        self.__spec__ = ModuleSpec(name, None, origin=__file__, is_package=True)
        self.__file__ = __file__  # the error of a failed import shows it
        self.__path__: list[str] = []
        self.__all__ = sorted(served for served, (home, _) in SERVED[name].items() if home != PLUGINS)

    def __getattr__(self, name: str) -> Any:
        target = SERVED[self.__name__].get(name)
        if target is None:
            why = f": {text}" if (text := reason(self.__name__, name)) else ""
            raise AttributeError(f"{self.__name__}.{name}: tunedgemm, which serves {self.__name__!r} here, has no counterpart{why}")
        value = _of_plugins(name) if target[0] == PLUGINS else operator.attrgetter(target[1])(importlib.import_module(target[0]))
        if value is None:
            raise AttributeError(f"{self.__name__}.{name}: no installed plugin serves it; see docs/migrating-from-aiter.md")
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *SERVED[self.__name__]})


def _of_plugins(name: str) -> Any:
    """Return what the first installed plugin with this name in its package has under it, or None."""
    for entry in metadata.entry_points(group="tunedgemm.backends"):
        with contextlib.suppress(Exception):  # a third party's import may raise anything
            return getattr(importlib.import_module(entry.module), name)
    return None


#: Modules that `install` replaced; None before `install`.
_before: dict[str, types.ModuleType] | None = None


def install(*, force: bool = False) -> None:
    """Serve ``import aiter`` and its GEMM modules in this process; a second call changes nothing.

    Args:
        force: hide an installed AITER, which other code of the process may need; `uninstall`
            restores it.

    Raises:
        UserError: AITER is installed, and *force* is not given.
    """
    global _before
    if _before is not None:
        return
    if not force and (NAME in sys.modules or importlib.util.find_spec(NAME) is not None):
        raise UserError("AITER is installed, and would be hidden; import from tunedgemm instead, or call install(force=True)")
    _before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == NAME}
    modules = {name: _ServedModule(name) for name in SERVED}
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    for alias, name in ALIASES.items():
        setattr(modules[NAME], alias, modules[name])
    sys.modules.update(modules)


def uninstall() -> None:
    """Undo `install`; names that were imported in between keep working."""
    global _before
    if _before is None:
        return
    for name in list(sys.modules):
        if name.partition(".")[0] == NAME:
            del sys.modules[name]
    sys.modules.update(_before)
    _before = None
