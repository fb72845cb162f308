"""The answer to an untuned call, and what ``auto`` means: the choice of a JSON file.

Files are looked at anew whenever a shape is asked about for the first time; ``tunedgemm.reload()`` makes every shape new.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path

import attrs
from tunedgemm.plugin import Device, PluginError, Shape, Solution, UserError

from tunedgemm_triton import buckets, jsonfile
from tunedgemm_triton.dialect import OURS, Dialect, sizes_of

_log = logging.getLogger("tunedgemm")


@attrs.frozen
class Choice:
    """What a JSON file says of a shape: the solution, None where the entry cannot serve, and where that stands."""

    solution: Solution | None
    path: Path
    key: str
    notes: tuple[str, ...] = ()


def heuristic_fallback(shape: Shape, device: Device) -> Solution | None:
    """The choice of a JSON file; None without one: a shape goes to a Triton kernel only where somebody tuned it or said so."""
    return chosen(OURS, shape, device)


def resolve(solution: Solution, shape: Shape, device: Device) -> Solution:
    """The solution itself; for AITER's alias ``auto`` (or no name) the choice of a JSON file, or the first enumerated one.

    Raises:
        PluginError: nothing is listed for the shape.
    """
    if solution.kernel_name not in ("auto", ""):
        return solution
    first = chosen(OURS, shape, device) or next(iter(OURS.listed(shape, device)), None)
    if first is None:
        raise PluginError(f"triton lists no kernel for {shape} on {device}")
    return first


def chosen(dialect: Dialect, shape: Shape, device: Device) -> Solution | None:
    """The solution of a file for a backend; a file that cannot be used is named once."""
    try:
        found = choice_of(dialect, shape, device)
    except UserError as error:
        _tell(f"{error}; the file is not used, `tunedgemm triton check` says more")
        return None
    for note in found.notes if found else ():
        _log.info("%s: %s: %s", found.path, found.key, note)
    return found.solution if found else None


def choice_of(dialect: Dialect, shape: Shape, device: Device) -> Choice | None:
    """What the file for a shape's weight says of it; None where there is no file for the architecture, or no bucket for its M.

    Raises:
        UserError: the file, or its entry, cannot be used.
    """
    if shape.op not in dialect.ops or not shape.m:
        return None
    tag = dialect.tag_of(shape)
    path = jsonfile.find(device.gfx, tag, sizes_of(shape))
    if path is None:
        return None
    entries = jsonfile.read(path)
    key = buckets.find(entries, shape.m, buckets.bounds_of(tag))
    if key is None:
        return None
    try:
        solution, notes = dialect.solution_of(entries[key], shape, device)
    except UserError as error:
        raise UserError(f"{path}: {key}: {error}") from None
    return Choice(solution, path, key, notes)


@functools.cache
def _tell(text: str) -> None:
    _log.warning("%s", text)
