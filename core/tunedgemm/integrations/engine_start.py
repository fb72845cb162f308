"""Start-up of an engine's plugin: its switch, the engine's version, and gains of earlier starts."""

from __future__ import annotations

import hashlib
import json
import logging
import os

from tunedgemm.errors import UserError
from tunedgemm.process.variables import OFF, ON

# Routing modules are imported late: an engine loads its plugin in all its processes, on or off.

#: Longest time, in seconds, of timing the rows against the engine's kernels at start-up.
_SECONDS = 8.0


def read_switch(variable: str, *others: str) -> str:
    """Read the environment variable that switches a plugin on.

    Args:
        variable: its name.
        others: its values other than on and off.

    Returns:
        "" for off, "1" for on, or one of *others*.

    Raises:
        UserError: the value is unknown.
    """
    value = os.environ.get(variable, "").strip().lower()
    if value not in (*ON, *OFF, *others):
        *first, last = ("1", "0", *others)
        raise UserError(f"{variable}: unknown value (got {os.environ[variable]!r}); use {', '.join(first)} or {last}")
    return "" if value in OFF else "1" if value in ON else value


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

    Raises:
        UserError: the variable is not a number.
    """
    import torch

    from tunedgemm.backends.artifact import artifact
    from tunedgemm.device import current_device
    from tunedgemm.integrations.engine_routes import compare
    from tunedgemm.tuner.trial import MEASURE

    text = os.environ.get(variable, "")
    try:
        seconds = float(text or _SECONDS)
    except ValueError as error:
        raise UserError(f"{variable}: not a number of seconds (got {text!r}); use {_SECONDS:g}, or 0 for no comparison") from error
    key = f"gains {MEASURE} {engine} {torch.__version__} {current_device()} {digest}"
    gains: dict[str, float] = json.loads(artifact(key, lambda: b"{}"))
    before = len(gains)
    compare(seconds, gains)
    if len(gains) > before:
        artifact(key, json.dumps(gains).encode, fresh=True)
