"""Untuned calls: which backends may serve them, on which devices, and what they choose."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import attrs

from tunedgemm.device import Device
from tunedgemm.libtypes import BUILTIN, INVARIANT, UNTUNED, UNTUNED_KINDS
from tunedgemm.process.variables import KINDS, read
from tunedgemm.products import data_sheet, measured_near, was_measured
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported

if TYPE_CHECKING:
    from tunedgemm.backends.registry import Registry

#: The variable that lists the libtypes for untuned calls.
VARIABLE = "TUNEDGEMM_FALLBACK"
#: Error bar of sizes that stand for those on an unmeasured device; rows of x and of the weight.
_BAR = 1.25
#: Most rows of x that leave the tensor cores of every product idle; multiples of N that stand for
#: one.
_FEW, _STEP = 4, 128


def untuned_libtypes(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the libtypes that may answer untuned calls, in order; a blank variable leaves none."""
    listed = environment.get(VARIABLE)
    names = () if listed is not None and not listed.strip(" ,") else read(VARIABLE, environment)
    return tuple(name for name in names if name != BUILTIN)


def choices(shape: Shape, device: Device, registry: Registry, libtypes: tuple[str, ...], *, invariant: bool = False) -> Iterator[Solution]:
    """Yield what the backends of some libtypes choose for an untuned call, in their order.

    Args:
        invariant: whether the bits of a row must not depend on M. The usual libtypes then are
            `INVARIANT`.
    """
    if invariant and libtypes == UNTUNED:
        libtypes = INVARIANT
    for libtype in libtypes:
        if UNTUNED_KINDS.get(libtype, device.kind) != device.kind:
            continue
        backend = registry.get(libtype) if libtype in registry else None
        if backend is None or isinstance(backend, Unsupported):
            continue
        chosen = backend.invariant_fallback(shape, device) if invariant else backend.heuristic_fallback(shape, device)
        if chosen is not None:
            yield chosen


def may_guess(device: Device) -> bool:
    """Check whether fitted heuristics may serve untuned calls on a device.

    They may on devices where they were measured, by units and memory, and on other known products
    of the architecture (see `stand_ins`). Elsewhere they may if the user lists libtypes in
    ``TUNEDGEMM_FALLBACK``.
    """
    return was_measured(device) or _is_modelled(device) or _lists(os.environ.get(VARIABLE, ""))


def stand_ins(shape: Shape, device: Device) -> list[tuple[Shape, Device]]:
    """Return shapes that load a measured device as *shape* loads an unmeasured one.

    A class of fitted choices has a shape on an unmeasured device if it has these, too. N grows with
    the units, by an error bar more. M remains while reading the weight takes longer than products
    do, with the error bar. Beyond, M grows with the rows from which products take longer. There are
    none for a measured device, or where the user lists libtypes.
    """
    known = data_sheet(device)
    if known is None or was_measured(device) or _lists(os.environ.get(VARIABLE, "")):
        return []
    alike = []
    for product in measured_near(device):
        m, n = shape.m, shape.n
        if m > max(_FEW, known.balance / _BAR):
            m = math.ceil(m * max(1.0, _BAR * product.balance / known.balance))
        if product.units != known.units:
            n = math.ceil(n * max(1.0, _BAR * product.units / known.units) / _STEP) * _STEP
        alike.append((attrs.evolve(shape, m=m, n=n), Device(product.gfx, product.units, product.name)))
    return alike


def _is_modelled(device: Device) -> bool:
    """Check whether the device is a known product of an architecture with measured ones."""
    return data_sheet(device) is not None and bool(measured_near(device))


@functools.lru_cache(maxsize=16)
def _lists(text: str) -> bool:
    """Check whether a value of the variable lists libtypes; an invalid one does not."""
    found = read(VARIABLE, {VARIABLE: text})
    return bool(found) and found is not KINDS[VARIABLE].default


def unmeasured(device: Device) -> str:
    """Return why fitted heuristics do not serve a GPU: none were measured there, or on other products
    of its architecture alone; else "".
    """
    measured = measured_near(device)
    if device.kind == "cpu" or (measured and may_guess(device)):
        return ""
    if not measured:
        return f"guesses were measured on no {device.gfx}; `tunedgemm tune` measures its kernels"
    places = ", ".join(product.name for product in measured)
    return f"guesses were measured on {places} alone; {VARIABLE} with a libtype allows them here"
