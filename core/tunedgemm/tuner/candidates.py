"""Stage 2, candidates: every solution that the chosen backends offer for a shape, torch's own call always among them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tunedgemm.device import Device
from tunedgemm.errors import PluginError
from tunedgemm.libtypes import BUILTIN
from tunedgemm.registry import Backend, Registry
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution

_log = logging.getLogger("tunedgemm")


def candidates(shape: Shape, device: Device, backends: Sequence[Backend], most: int = 0) -> list[Solution]:
    """Ask each backend in turn; one that does not support the shape, or breaks the contract, is left out and logged.

    Args:
        most: how many of each backend, which lists its best guesses first; 0 is all.
    """
    found: list[Solution] = []
    for backend in backends:
        answer = backend.supports(shape, device)
        if not answer:
            _log.info("%s: %s does not take it: %s", shape, backend.libtype, answer)
            continue
        try:
            found += backend.solutions(shape, device)[: most or None]
        except PluginError as error:
            _log.warning("%s: %s left out: %s", shape, backend.libtype, error)
    return found


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
