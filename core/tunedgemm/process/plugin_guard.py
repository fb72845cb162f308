"""Run plugin code in isolation: catch anything it raises, and undo its changes to the process."""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable
from importlib import metadata
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

from tunedgemm.errors import UserError
from tunedgemm.process.interrupt import is_interrupt
from tunedgemm.process.process_state import kept_switches
from tunedgemm.text.printable import warn_once

_log = logging.getLogger("tunedgemm")


def described(error: BaseException) -> str:
    """Format an exception, even if its own text raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException as broken:  # a plugin's __str__ may raise anything
        return f"{type(error).__name__}: its text raised {type(broken).__name__}"


def attempt(function: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """Call a function; return its result and "", or None and the error.

    SystemExit and GeneratorExit count as errors; exceptions of signals propagate. A process that
    the function forks exits here.
    """
    process = os.getpid()
    try:
        return function(*arguments), ""
    except BaseException as error:  # a plugin may raise anything
        if is_interrupt(error):
            raise
        return None, described(error)
    finally:
        if os.getpid() != process:
            os._exit(0)


def load(entry: EntryPoint) -> tuple[Any, str]:
    """Import an entry point like `attempt`; warn about and undo its changes to the process."""
    with kept_switches() as changed:
        answer = attempt(entry.load)
    if changed:
        # Each child process imports the same plugin: one warning suffices.
        level = logging.WARNING if multiprocessing.parent_process() is None else logging.DEBUG
        owner = entry.dist.name if entry.dist else entry.value
        _log.log(level, "%s of %s: importing it changed %s; undone", entry.name, owner, ", ".join(changed))
    return answer


def load_extra(group: str, extra: str, thing: str) -> Any:
    """Load the entry point of an extra's distribution.

    Args:
        thing: what needs it, in the user's words.

    Raises:
        UserError: it is not installed, or cannot be imported.
    """
    remedy = f"pip install 'tunedgemm[{extra}]'"
    entry = next((entry for entry in entry_points(group=group) if entry.name == extra), None)
    if entry is None:
        raise UserError(f"{thing}: not installed (got no tunedgemm-{extra} in this environment); {remedy}")
    loaded, fault = load(entry)
    if fault:
        raise UserError(f"{thing}: {entry.value} cannot be loaded (got {fault}); {remedy}")
    return loaded


def entry_points(*, group: str) -> list[EntryPoint]:
    """Return a group's entry points; warn about and skip distributions with broken metadata."""
    points = _installed(tuple((folder, _changed_at(folder)) for folder in sys.path)).select(group=group)
    return [point for point in points if point.dist is None or _is_readable(point.dist)]


@functools.lru_cache(maxsize=1)
def _installed(folders: tuple[tuple[str, int], ...]) -> EntryPoints:  # noqa: ARG001
    """Return all entry points, read once for all groups: 0.2 s with 500 distributions."""
    return metadata.entry_points()  # type: ignore[return-value, unused-ignore] # Python 3.10 has another type with `select`


def _changed_at(folder: str) -> int:
    """Return the modification time of a folder in ns; 0 if it is missing."""
    try:
        return Path(folder).stat().st_mtime_ns
    except OSError:
        return 0


@functools.lru_cache(maxsize=1024)
def name_of(distribution: metadata.Distribution) -> str:
    """Return the name of a distribution, whose metadata take 0.2 ms to read."""
    return distribution.name


def _is_readable(distribution: metadata.Distribution) -> bool:
    try:
        name_of(distribution)
    except Exception as error:
        place = getattr(distribution, "_path", "") or distribution.locate_file("")
        warn_once(f"{place}: left out: the metadata of this distribution cannot be read: {described(error)}")
        return False
    return True
