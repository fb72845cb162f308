"""Start-up of an engine's plugin: its switch, the engine's version, and gains of earlier starts."""

from __future__ import annotations

import hashlib
import json
import logging

from tunedgemm.errors import UserError
from tunedgemm.process.variables import read

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


def fingerprint(switch: str) -> str:
    """Digest the choice of kernels: version, switch, plugins, tables, and whether shapes are captured."""
    from importlib.metadata import entry_points

    from tunedgemm import __version__
    from tunedgemm.dispatch.tuned_gemm import dispatcher
    from tunedgemm.ops import ops

    parts = [__version__, switch]
    parts += sorted(f"{point.name} {point.dist and point.dist.version}" for point in entry_points(group="tunedgemm.backends"))
    for op in ops():
        op_dispatcher = dispatcher(op)
        try:
            settings = op_dispatcher.settings
            parts += [op, op_dispatcher.table.fingerprint(), str(settings.capture), str(op_dispatcher.on_miss is not None)]
            parts += settings.untuned
        except UserError as error:
            parts.append(str(error))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:10]


def compare_remembered(engine: str, variable: str, digest: str) -> None:
    """Time the rows of all routes against the engine's kernels, except those timed by an earlier start.

    Args:
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
    gains: dict[str, float] = json.loads(artifact(key, lambda: b"{}"))
    before = len(gains)
    compare(seconds, gains)
    if len(gains) > before:
        artifact(key, json.dumps(gains).encode, fresh=True)
