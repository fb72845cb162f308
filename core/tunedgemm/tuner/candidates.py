"""Stage 2, candidates: every solution that the chosen backends offer for a shape, torch's own call always among them.

A shape with a bias is also offered the best guesses for the product without it, with the bias added
after them: which is faster is measured, and verified as any other.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tunedgemm.backends import split
from tunedgemm.backends.registry import Backend, Registry
from tunedgemm.device import Device
from tunedgemm.errors import PluginError
from tunedgemm.libtypes import BUILTIN
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution

_log = logging.getLogger("tunedgemm")

#: Best guesses of each backend that are tried with the bias split off; the neighbours of those that lead follow.
SPLIT_GUESSES = 4


def candidates(shape: Shape, device: Device, backends: Sequence[Backend], most: int = 0) -> list[Solution]:
    """Ask each backend in turn; one that does not support the shape, or breaks the contract, is left out and logged.

    Args:
        most: how many of each backend, which lists its best guesses first; 0 is all. Of few, a
            quarter may have the bias split off.
    """
    found: list[Solution] = []
    plain = split.product(shape)
    for backend in backends:
        own = _listed(backend, shape, device)
        guesses = _listed(backend, plain, device) if plain is not None and backend.libtype != BUILTIN else []
        behind = guesses[: min(SPLIT_GUESSES, most // 4 if own else most) if most else SPLIT_GUESSES]
        found += own[: most - len(behind) if most else None]
        found += map(split.added, behind)
    return found


def _listed(backend: Backend, shape: Shape, device: Device) -> list[Solution]:
    answer = backend.supports(shape, device)
    if not answer:
        _log.info("%s: %s does not take it: %s", shape, backend.libtype, answer)
        return []
    try:
        return backend.solutions(shape, device)
    except PluginError as error:
        _log.warning("%s: %s left out: %s", shape, backend.libtype, error)
        return []


def refusals(shape: Shape, device: Device, backends: Sequence[Backend]) -> list[str]:
    """Why each backend offers nothing for a shape."""
    found = []
    for backend in backends:
        answer = backend.supports(shape, device)
        try:
            reason = str(answer) if not answer else "" if backend.solutions(shape, device) else "it lists no solution"
        except PluginError as error:
            reason = str(error)
        found += [f"{backend.libtype}: {reason}"] if reason else []
    return found


def neighbours(leaders: Sequence[tuple[Backend, Solution]], shape: Shape, device: Device) -> list[Solution]:
    """Ask the leaders' backends for what lies around them; one that breaks the contract is left out and logged."""
    found: list[Solution] = []
    for backend, leader in leaders:
        try:
            found += backend.refine(leader, shape, device)
        except PluginError as error:
            _log.warning("%s: neighbours of %s left out: %s", shape, leader, error)
    return found


def reference(shape: Shape, device: Device, registry: Registry) -> Solution | None:
    """Torch's own call for the shape, the verdict's yardstick, whether or not it may be stored."""
    builtin = registry.get(BUILTIN)
    return builtin.heuristic_fallback(shape, device) if isinstance(builtin, Backend) else None
