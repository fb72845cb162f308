"""Start-up of an engine's plugin: its switch, the engine's version, and gains of earlier starts.

An engine's start-up calls the plugin at many places. Whatever fails there, `spared` keeps the
engine going.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterator

from tunedgemm.errors import UserError
from tunedgemm.process.variables import read
from tunedgemm.text.printable import printable_line

#: Longest description of an error: a compiler's has thousands of lines.
_LONGEST = 300

# Routing modules are imported late: an engine loads its plugin in all its processes, on or off.


def read_switch(variable: str) -> str:
    """Return what the variable that switches a plugin on says: "" for off, "1" for on, or its other word."""
    value = read(variable)
    return value if isinstance(value, str) else "1" if value else ""


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

    from tunedgemm import __version__
    from tunedgemm.dispatch.tuned_gemm import dispatcher
    from tunedgemm.ops import ops

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


def compare_remembered(log: logging.Logger, engine: str, variable: str, digest: str) -> None:
    """Time the rows of all routes against the engine's kernels, except those timed by an earlier start.

    Args:
        log: the engine's.
        engine: the engine's name and version.
        variable: the environment variable with the longest time in seconds.
        digest: `fingerprint` of the tables.
    """
    import torch

    from tunedgemm.backends.artifact import artifact
    from tunedgemm.device import current_device
    from tunedgemm.integrations.engine_routes import compare
    from tunedgemm.tuner.trial import MEASURE

    seconds = float(read(variable))
    key = f"gains {MEASURE} {engine} {torch.__version__} {current_device()} {digest}"
    gains: dict[str, float] = {}
    with spared(log, "reading the gains of earlier starts"):
        gains |= json.loads(artifact(key, lambda: b"{}"))
    before = len(gains)
    with spared(log, "timing the rows against the engine's kernels"):
        compare(seconds, gains)
    if len(gains) > before:
        with spared(log, "keeping the gains for the next start"):
            artifact(key, json.dumps(gains).encode, fresh=True)
