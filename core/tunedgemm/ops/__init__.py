"""Registry of ops: the modules of this folder, and entry points of group ``tunedgemm.ops``."""

from __future__ import annotations

import functools
import importlib
import logging
import pkgutil
import threading
from collections.abc import Mapping
from types import MappingProxyType

from tunedgemm.errors import UnknownOpError
from tunedgemm.ops.op import Op
from tunedgemm.process.plugin_guard import entry_points, load

GROUP = "tunedgemm.ops"
#: The op assumed where none is named: AITER's ``TunedGemm``, files and commands.
DEFAULT_OP = "a16w16"
_log = logging.getLogger("tunedgemm")
_others = threading.local()


@functools.cache
def ops() -> Mapping[str, Op]:
    """Return all ops by name: those of this folder, then third parties'.

    A broken third-party op is skipped with a warning. A third-party op that calls this during its
    import gets the ops of this folder only.
    """
    by_name: dict[str, Op] = {}
    for module in pkgutil.iter_modules(__path__):
        found = vars(importlib.import_module(f"{__name__}.{module.name}")).values()
        by_name |= {op.name: op for op in found if isinstance(op, Op)}
    by_name = dict(sorted(by_name.items()))
    if getattr(_others, "loading", False):
        return MappingProxyType(by_name)
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        _others.loading = True
        try:
            op, fault = load(entry)
        finally:
            _others.loading = False
        if fault:
            _log.warning("op %r from %s cannot be loaded: %s", entry.name, entry.value, fault)
            continue
        if not isinstance(op, Op) or op.name in by_name:
            _log.warning("op %r from %s skipped: %s", entry.name, entry.value, "its name is taken" if isinstance(op, Op) else "not an Op")
            continue
        by_name[op.name] = op
    return MappingProxyType(by_name)


def op_named(name: str) -> Op:
    """Return the op of this name.

    Raises:
        UnknownOpError: no such op is registered.
    """
    try:
        return ops()[name]
    except KeyError:
        raise UnknownOpError(f"unknown op {name!r}; registered: {', '.join(sorted(ops()))}") from None


@functools.cache
def functions() -> Mapping[str, Op]:
    """Map each public function's name to its op; the first op that names it wins."""
    by_name: dict[str, Op] = {}
    for op in ops().values():
        for name in op.functions if op.entry is not None else ():
            by_name.setdefault(name, op)
    return MappingProxyType(by_name)
