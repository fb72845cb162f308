"""Untuned calls: which backends may serve them, on which devices, and what they choose."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from tunedgemm.device import Device
from tunedgemm.libtypes import BUILTIN, UNTUNED_KINDS
from tunedgemm.process.variables import KINDS, read
from tunedgemm.products import measured_near, was_measured
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported

if TYPE_CHECKING:
    from tunedgemm.backends.registry import Registry

#: The variable that lists the libtypes for untuned calls.
VARIABLE = "TUNEDGEMM_FALLBACK"


def untuned_libtypes(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the libtypes that may answer untuned calls, in order; a blank variable leaves none."""
    listed = environment.get(VARIABLE)
    names = () if listed is not None and not listed.strip(" ,") else read(VARIABLE, environment)
    return tuple(name for name in names if name != BUILTIN)


def choices(shape: Shape, device: Device, registry: Registry, libtypes: tuple[str, ...]) -> Iterator[Solution]:
    """Yield what the backends of some libtypes choose for an untuned call, in their order."""
    for libtype in libtypes:
        if UNTUNED_KINDS.get(libtype, device.kind) != device.kind:
            continue
        backend = registry.get(libtype) if libtype in registry else None
        chosen = None if backend is None or isinstance(backend, Unsupported) else backend.heuristic_fallback(shape, device)
        if chosen is not None:
            yield chosen


def may_guess(device: Device) -> bool:
    """Check whether fitted heuristics may serve untuned calls on a device.

    They may on devices where they were measured, by units and memory. Elsewhere they may if the
    user lists libtypes in ``TUNEDGEMM_FALLBACK``.
    """
    return was_measured(device) or _lists(os.environ.get(VARIABLE, ""))


@functools.lru_cache(maxsize=16)
def _lists(text: str) -> bool:
    """Check whether a value of the variable lists libtypes; an invalid one does not."""
    found = read(VARIABLE, {VARIABLE: text})
    return bool(found) and found is not KINDS[VARIABLE].default


def unmeasured(device: Device) -> str:
    """Return why fitted heuristics do not serve a device of a measured architecture; else ""."""
    measured = measured_near(device)
    if not measured or may_guess(device):
        return ""
    places = ", ".join(product.name for product in measured)
    return f"guesses were measured on {places} alone; {VARIABLE} with a libtype allows them here"
