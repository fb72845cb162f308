"""Stage 2, candidates: the solutions that the chosen backends offer for a shape, and the baseline.

A shape with a bias also gets the best guesses for the product without it, with the bias added
afterwards. They are verified and measured like all others.
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

#: Best guesses of each backend to try with the bias split off; refining adds their neighbours.
SPLIT_GUESSES = 4


def candidates(shape: Shape, device: Device, backends: Sequence[Backend], most: int = 0) -> list[Solution]:
    """List the solutions of each backend.

    A backend that does not support the shape, or breaks the contract, is logged and left out.

    Args:
        shape: the shape.
        device: the device to run on.
        backends: the backends, in order.
        most: solutions of each backend, which lists its best guesses first; 0 for all. A quarter of
            few may have the bias split off.
    """
    solutions: list[Solution] = []
    plain = split.product_shape(shape)
    for backend in backends:
        listed = _listed(backend, shape, device)
        guesses = _listed(backend, plain, device) if plain is not None and backend.libtype != BUILTIN else []
        with_split_bias = guesses[: min(SPLIT_GUESSES, most // 4 if listed else most) if most else SPLIT_GUESSES]
        solutions += listed[: most - len(with_split_bias) if most else None]
        solutions += map(split.with_add, with_split_bias)
    return solutions


def _listed(backend: Backend, shape: Shape, device: Device) -> list[Solution]:
    answer = backend.supports(shape, device)
    if not answer:
        _log.info("%s: %s does not support it: %s", shape, backend.libtype, answer)
        return []
    try:
        return backend.solutions(shape, device)
    except PluginError as error:
        _log.warning("%s: %s left out: %s", shape, backend.libtype, error)
        return []


def refusals(shape: Shape, device: Device, backends: Sequence[Backend]) -> list[str]:
    """Return why each backend offers nothing for a shape."""
    reasons = []
    for backend in backends:
        answer = backend.supports(shape, device)
        try:
            reason = str(answer) if not answer else "" if backend.solutions(shape, device) else "it lists no solution"
        except PluginError as error:
            reason = str(error)
        reasons += [f"{backend.libtype}: {reason}"] if reason else []
    return reasons


def neighbours(leaders: Sequence[tuple[Backend, Solution]], shape: Shape, device: Device) -> list[Solution]:
    """List the neighbours of the leaders; log and leave out a backend that breaks the contract."""
    near: list[Solution] = []
    for backend, leader in leaders:
        try:
            near += backend.refine(leader, shape, device)
        except PluginError as error:
            _log.warning("%s: neighbours of %s left out: %s", shape, leader, error)
    return near


def baseline(shape: Shape, device: Device, registry: Registry) -> Solution | None:
    """Return the baseline: torch's own call for the shape, whether or not it may be stored."""
    builtin = registry.get(BUILTIN)
    return builtin.heuristic_fallback(shape, device) if isinstance(builtin, Backend) else None
