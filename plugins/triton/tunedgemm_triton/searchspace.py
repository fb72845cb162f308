"""Search spaces of the user's own: the configurations that are timed in place of those that a backend lists.

A file is a JSON object of parameters, each with its values, whose product is the space; or a list of such objects, which add up.
The environment tells the tuner's workers which one: they list solutions in processes of their own.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
from tunedgemm.plugin import Device, Option, Shape, Solution, Unsupported, UserError

from tunedgemm_triton import spaces
from tunedgemm_triton.dialect import Dialect
from tunedgemm_triton.parameters import NAMES, SPLIT, Entry

#: The space of AITER's guide to tuning Triton kernels, by name.
AITER = "aiter"


@attrs.frozen(eq=False)
class Space:
    """Configurations: where they come from, and each as an entry of a JSON file; one that was read twice is the same object."""

    source: str
    entries: tuple[Entry, ...]


def space_of(text: str) -> Space:
    """The space that a user means: a file, or ``aiter``.

    Raises:
        UserError: it cannot be read, or is no space.
    """
    if text == AITER:
        return _aiters()
    path = Path(text).expanduser()
    try:
        return _read(str(path), path.stat().st_mtime_ns)
    except OSError as error:
        raise UserError(f"{path}: the search space cannot be read: {error.strerror or error}; a file, or {AITER}") from None


def _lasting(text: str) -> str:
    """The text of a space as processes in other folders understand it; raises UserError for what is no space."""
    return "" if not text else text if text == AITER else str(Path(space_of(text).source).resolve())


OPTION = Option(
    "--triton-space", "TUNEDGEMM_TRITON_SPACE", f"configurations to try, a JSON file or {AITER}, in place of those listed", kind=_lasting
)


def current() -> Space | None:
    """The space that the environment asks for."""
    text = OPTION.value()
    return space_of(text) if text else None


@contextlib.contextmanager
def used(text: str) -> Iterator[None]:
    """Have this process, and those that it starts, list the solutions of a space; with "" what backends list for themselves."""
    before = os.environ.get(OPTION.variable)
    os.environ[OPTION.variable] = _lasting(text)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(OPTION.variable, None)
        else:
            os.environ[OPTION.variable] = before


@attrs.frozen
class Listed:
    """The solutions of a space for a shape.

    Attributes:
        solutions: those that fit, each once, in the order of the space.
        different: kernels that differ on the device.
        reason: why the first that cannot serve cannot.
    """

    solutions: tuple[Solution, ...]
    different: int
    reason: str = ""


@functools.lru_cache(maxsize=64)
def listed(space: Space, dialect: Dialect, shape: Shape, device: Device) -> Listed:
    """What of a space can serve a shape.

    Raises:
        UserError: a configuration has a parameter or value that no kernel has.
    """
    found: dict[Solution, None] = {}
    reason = ""
    for entry in space.entries:
        try:
            solution, notes = dialect.solution_of(entry, shape, device)
        except UserError as error:
            raise UserError(f"{space.source}: {dict(entry)}: {error}") from None
        if solution is not None:
            found[solution] = None
        elif not reason:
            reason = notes[-1] if notes else ""
    fitting = tuple(solution for solution in found if dialect.fits(solution, shape, device))
    if found and not fitting:
        reason = "none fits the shared memory and the registers, with work for every program"
    return Listed(fitting, len(found), reason)


def enumerated(dialect: Dialect, shape: Shape, device: Device, supports: bool | Unsupported) -> Iterable[Solution] | None:
    """The solutions of the space that the environment asks for; None where it asks for none."""
    space = current()
    if space is None:
        return None
    return listed(space, dialect, shape, device).solutions if supports else ()


def inside(near: Iterable[Solution], dialect: Dialect, shape: Shape, device: Device) -> Iterable[Solution]:
    """Those neighbours that lie in the space that the environment asks for; all where it asks for none."""
    space = current()
    if space is None:
        return near
    known = {*listed(space, dialect, shape, device).solutions}
    return [solution for solution in near if solution in known]


@functools.lru_cache(maxsize=8)
def _read(path: str, _changed: int) -> Space:
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: is no JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is no JSON: {error}") from None
    parts = found if isinstance(found, list) else [found]
    if not parts or not all(isinstance(part, dict) and part for part in parts):
        raise UserError(
            f"{path}: must be an object of parameters with their values, as {{'BLOCK_SIZE_M': [32, 64], ...}}, or a list of such"
        )
    return Space(path, tuple(entry for part in parts for entry in _product(part)))


def _product(values: Mapping[str, Any]) -> Iterator[Entry]:
    choices = [value if isinstance(value, list) else [value] for value in values.values()]
    for chosen in itertools.product(*choices):
        yield dict(zip(values, chosen, strict=True))


@functools.cache
def _aiters() -> Space:
    """The loops of AITER's guide: 5832 configurations."""
    space = {NAMES[field]: list(values) for field, values in spaces.BLOCKSCALE_OF_AITER.items()}
    space["cache_modifier"] = ["", ".cg"]
    fixed = {"BLOCK_SIZE_K": 128, "kpack": 2, "matrix_instr_nonkdim": 16}
    return Space(AITER, tuple(_product({**space, SPLIT: list(spaces.SPLITS_OF_AITER), **fixed})))
