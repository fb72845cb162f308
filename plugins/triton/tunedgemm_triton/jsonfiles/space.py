"""Read the users' search spaces, which replace the configurations that a backend lists.

A file is a JSON object of parameters, each with its values, whose product is the space; or a list
of such objects, which add up. An environment variable passes the choice to the tuner's worker
processes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
from tunedgemm.plugin import Device, Option, Shape, Solution, UserError
from tunedgemm.tools.files import expanded, read_regular

from tunedgemm_triton import tiles
from tunedgemm_triton.jsonfiles.dialect import Dialect
from tunedgemm_triton.jsonfiles.entries import NAMES, SPLIT, Entry
from tunedgemm_triton.jsonfiles.files import MOST_MIB

#: The space of AITER's guide to tuning Triton kernels, by name.
AITER = "aiter"
#: Most configurations of a file; timing so many would take days.
MOST = 200_000


@attrs.frozen(eq=False)
class Space:
    """Configurations, each an entry of a JSON file, and their source.

    Reading a space again returns the same object.
    """

    source: str
    entries: tuple[Entry, ...]


def space_of(text: str) -> Space:
    """Return the space of a user's text: a file, or ``aiter``.

    Raises:
        UserError: the file cannot be read or holds no space.
    """
    if text == AITER:
        return _aiter_space()
    path = expanded(text)
    try:
        return _read(str(path), path.stat().st_mtime_ns)
    except OSError as error:
        raise UserError(f"{path}: the search space cannot be read: {error.strerror or error}; name a file, or {AITER}") from None


def _absolute(text: str) -> str:
    """Return a space's text with an absolute path, for processes in other folders; raise UserError
    for no space.
    """
    return "" if not text else text if text == AITER else str(Path(space_of(text).source).resolve())


OPTION = Option(
    "--triton-space", "TUNEDGEMM_TRITON_SPACE", f"configurations to try instead of those listed: a JSON file or {AITER}", kind=_absolute
)


def current() -> Space | None:
    """Return the space that the environment selects, or None."""
    text = OPTION.value()
    return space_of(text) if text else None


@contextlib.contextmanager
def used(text: str) -> Iterator[None]:
    """Make this process and its children list the solutions of a space; with "" those of the
    backends.
    """
    before = os.environ.get(OPTION.variable)
    os.environ[OPTION.variable] = _absolute(text)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(OPTION.variable, None)
        else:
            os.environ[OPTION.variable] = before


@attrs.frozen
class ListedSpace:
    """Solutions of a space for a shape.

    Attributes:
        solutions: those that fit, each once, in the order of the space.
        different: number of kernels that differ on the device.
        reason: why the first unusable configuration cannot serve.
    """

    solutions: tuple[Solution, ...]
    different: int
    reason: str = ""


@functools.lru_cache(maxsize=64)
def listed(space: Space, dialect: Dialect, shape: Shape, device: Device) -> ListedSpace:
    """Return the solutions of a space that can serve a shape.

    Raises:
        UserError: a configuration has an unknown parameter or value.
    """
    different: dict[Solution, None] = {}
    reason = ""
    for entry in space.entries:
        try:
            solution, notes = dialect.solution_of(entry, shape, device)
        except UserError as error:
            raise UserError(f"{space.source}: {str(dict(entry))[:300]}: {error}") from None
        if solution is not None:
            different[solution] = None
        elif not reason:
            reason = notes[-1] if notes else ""
    fitting = tuple(solution for solution in different if dialect.fits(solution, shape, device))
    if different and not fitting:
        reason = "none fits the shared memory and the registers with work for every program"
    return ListedSpace(fitting, len(different), reason)


def enumerate_current(dialect: Dialect, shape: Shape, device: Device) -> Iterable[Solution] | None:
    """Return the solutions of the space that the environment selects; None without one."""
    space = current()
    return None if space is None else listed(space, dialect, shape, device).solutions


def filter_current(near: Iterable[Solution], dialect: Dialect, shape: Shape, device: Device) -> Iterable[Solution]:
    """Return the neighbours inside the space that the environment selects; all without one."""
    space = current()
    if space is None:
        return near
    known = {*listed(space, dialect, shape, device).solutions}
    return [solution for solution in near if solution in known]


@functools.lru_cache(maxsize=8)
def _read(path: str, _changed: int) -> Space:
    try:
        content = json.loads(read_regular(Path(path), MOST_MIB).decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: invalid JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: invalid JSON: {error}") from None
    parts = content if isinstance(content, list) else [content]
    if not parts or not all(isinstance(part, dict) and part for part in parts):
        raise UserError(f"{path}: must be an object of parameters and values, as {{'BLOCK_SIZE_M': [32, 64], ...}}, or a list of them")
    counts = (math.prod(len(value) if isinstance(value, list) else 1 for value in part.values()) for part in parts)
    if sum(counts) > MOST:
        raise UserError(f"{path}: must list at most {MOST} configurations; leave out values")
    return Space(path, tuple(entry for part in parts for entry in _product(part)))


def _product(values: Mapping[str, Any]) -> Iterator[Entry]:
    choices = [value if isinstance(value, list) else [value] for value in values.values()]
    for combination in itertools.product(*choices):
        yield dict(zip(values, combination, strict=True))


@functools.cache
def _aiter_space() -> Space:
    """Return the 5832 configurations of AITER's guide."""
    space = {NAMES[field]: list(values) for field, values in tiles.BLOCKSCALE_OF_AITER.items()}
    space["cache_modifier"] = ["", ".cg"]
    fixed = {"BLOCK_SIZE_K": 128, "kpack": 2, "matrix_instr_nonkdim": 16}
    return Space(AITER, tuple(_product({**space, SPLIT: list(tiles.SPLITS_OF_AITER), **fixed})))
