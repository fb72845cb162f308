"""Start-up of an engine's plugin: version check, steps that may fail, digest of the tables.

The engine calls the plugin at many points of its start-up; `spared` keeps failures from stopping
the engine.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.abc
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tunedgemm.integrations import printable_line, read
from tunedgemm.plugin import UserError

#: Variable of batch-invariant mode.
INVARIANT = "TUNEDGEMM_BATCH_INVARIANT"
#: Most characters of an error's description, since compilers print thousands of lines.
_LONGEST = 300


def unknown_version(engine: str, version: str, supported: tuple[tuple[int, ...], tuple[int, ...]]) -> str:
    """Return why a version of an engine is outside the supported range; "" if it is inside."""
    parts = tuple(int(part) for part in version.split(".")[: len(supported[0])] if part.isdecimal())
    if supported[0] <= parts <= supported[1]:
        return ""
    first, last = (".".join(map(str, bound)) for bound in supported)
    return f"unknown version of {engine} (got {version}); known are {first} to {last}"


def refuses_mode() -> bool:
    """Check whether the user switches batch-invariant mode off, which an engine's own mode turns on."""
    return bool(os.environ.get(INVARIANT, "").strip()) and not read(INVARIANT)


def is_supported_version(log: logging.Logger, engine: str, version: str, supported: tuple[tuple[int, ...], tuple[int, ...]]) -> bool:
    """Check that a version is in the supported range; warn that the plugin is off otherwise."""
    if reason := unknown_version(engine, version, supported):
        log.warning("tunedgemm is off: %s", reason)
    return not reason


@contextlib.contextmanager
def spared(log: logging.Logger, step: str) -> Iterator[None]:
    """Run a step of start-up; log a failure as a warning and continue."""
    try:
        yield
    except Exception as error:  # a plugin, a kernel or an engine of another form may raise anything
        log.warning("tunedgemm: %s failed, and the engine goes on without: %s", step, described(error))


def described(error: Exception) -> str:
    """Format an error as one line; our own errors without the class name."""
    return printable_line(f"{error}" if isinstance(error, UserError) else f"{type(error).__name__}: {error}")[:_LONGEST]


def after_import(module: str, action: Callable[[], None]) -> None:
    """Call a function when a module has been imported: at once if it is already, or if none has that name."""
    try:
        awaited = module not in sys.modules and importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent
        awaited = False
    if awaited:
        sys.meta_path.insert(0, _Awaited(module, action))
    else:
        action()


class _Awaited(importlib.abc.MetaPathFinder):
    """Finder of one module, which the other finders find; it leaves when the module has been imported."""

    def __init__(self, module: str, action: Callable[[], None]) -> None:
        self._module, self._action, self._is_asking = module, action, False

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        """Return the spec of the module, whose loader calls the function last; None for other modules."""
        del path, target
        if name != self._module or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            setattr(spec.loader, "exec_module", self._followed(spec.loader.exec_module))  # noqa: B010 - its type allows no assignment
        return spec

    def _followed(self, theirs: Callable[[Any], None]) -> Callable[[Any], None]:
        def exec_module(module: Any) -> None:
            theirs(module)
            if self in sys.meta_path:  # else another import of it was first
                sys.meta_path.remove(self)
                self._action()

        return exec_module


@functools.cache
def plugins() -> list[str]:
    """List the installed backends and their versions; scanning all distributions takes 40 ms."""
    from importlib.metadata import entry_points

    return sorted(f"{point.name} {point.dist and point.dist.version}" for point in entry_points(group="tunedgemm.backends"))


def fingerprint(switch: str) -> str:
    """Digest all that determines kernels: version, switch, plugins, tables, deny lists, capture, mode."""
    from tunedgemm import __version__, dispatcher
    from tunedgemm.integrations import DenyList
    from tunedgemm.tools.tables import ops

    parts = [__version__, switch]
    parts += plugins()
    parts += [entry.text() for entry in DenyList.load().entries]  # without their files, which ranks may have elsewhere
    for op in ops():
        try:
            op_dispatcher = dispatcher(op)
            settings = op_dispatcher.settings
            parts += [op, op_dispatcher.table.fingerprint(), str(settings.capture), str(settings.tunes_online(op))]
            parts.append(str(settings.batch_invariant))
            parts += settings.untuned
        except Exception as error:  # a plugin may raise anything
            parts.append(str(error))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:10]
