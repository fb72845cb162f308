"""Start-up of an engine's plugin: the engine's version, steps that may fail, and the tables' digest.

An engine's start-up calls the plugin at many places. Whatever fails there, `spared` keeps the
engine going.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator

from tunedgemm.integrations import printable_line
from tunedgemm.plugin import UserError

#: Longest description of an error: a compiler's has thousands of lines.
_LONGEST = 300


def unknown_version(engine: str, version: str, supported: tuple[tuple[int, ...], tuple[int, ...]]) -> str:
    """Return why a version of an engine is not in the known range, "" if it is."""
    parts = tuple(int(part) for part in version.split(".")[: len(supported[0])] if part.isdecimal())
    if supported[0] <= parts <= supported[1]:
        return ""
    first, last = (".".join(map(str, bound)) for bound in supported)
    return f"unknown version of {engine} (got {version}); known are {first} to {last}"


def is_supported_version(log: logging.Logger, engine: str, version: str, supported: tuple[tuple[int, ...], tuple[int, ...]]) -> bool:
    """Return whether a version is in the known range; if not, warn that the plugin is off."""
    if reason := unknown_version(engine, version, supported):
        log.warning("tunedgemm is off: %s", reason)
    return not reason


@contextlib.contextmanager
def spared(log: logging.Logger, step: str) -> Iterator[None]:
    """Run a step of ours in an engine's start-up, which goes on if it fails; one warning says why."""
    try:
        yield
    except Exception as error:  # a plugin, a kernel or an engine of another form may raise anything
        log.warning("tunedgemm: %s failed, and the engine goes on without: %s", step, described(error))


def described(error: Exception) -> str:
    """Return an error in a line, for a reason; the messages of our own need no name of a class."""
    return printable_line(f"{error}" if isinstance(error, UserError) else f"{type(error).__name__}: {error}")[:_LONGEST]


def fingerprint(switch: str) -> str:
    """Digest the choice of kernels: version, switch, plugins, tables, and whether shapes are captured."""
    from importlib.metadata import entry_points

    from tunedgemm import __version__, dispatcher
    from tunedgemm.tools.tables import ops

    parts = [__version__, switch]
    parts += sorted(f"{point.name} {point.dist and point.dist.version}" for point in entry_points(group="tunedgemm.backends"))
    for op in ops():
        try:
            op_dispatcher = dispatcher(op)
            settings = op_dispatcher.settings
            parts += [op, op_dispatcher.table.fingerprint(), str(settings.capture), str(op_dispatcher.on_miss is not None)]
            parts += settings.untuned
        except Exception as error:  # a plugin may raise anything
            parts.append(str(error))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:10]
