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
from tunedgemm.tuner.trial import Candidate

_log = logging.getLogger("tunedgemm")


def candidates(shape: Shape, device: Device, backends: Sequence[Backend]) -> list[Candidate]:
    """Ask each backend in turn; one that does not support the shape, or breaks the contract, is left out and logged."""
    found = []
    for backend in backends:
        answer = backend.supports(shape, device)
        if not answer:
            _log.info("%s: %s does not take it: %s", shape, backend.libtype, answer)
            continue
        try:
            found += [Candidate(solution, backend) for solution in backend.solutions(shape, device)]
        except PluginError as error:
            _log.warning("%s: %s left out: %s", shape, backend.libtype, error)
    return found


def neighbours(leaders: Sequence[Candidate], shape: Shape, device: Device) -> list[Candidate]:
    """Ask the leaders' backends for what lies around them; one that breaks the contract is left out and logged."""
    found = []
    for leader in leaders:
        try:
            found += [Candidate(solution, leader.backend) for solution in leader.backend.refine(leader.solution, shape, device)]
        except PluginError as error:
            _log.warning("%s: neighbours of %s left out: %s", shape, leader.solution, error)
    return found


def reference(shape: Shape, device: Device, registry: Registry) -> Candidate | None:
    """Torch's own call for the shape, the verdict's yardstick, whether or not it may be stored."""
    builtin = registry.get(BUILTIN)
    if not isinstance(builtin, Backend):
        return None
    solution: Solution | None = builtin.heuristic_fallback(shape, device)
    return Candidate(solution, builtin) if solution else None
