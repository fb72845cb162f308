"""Untuned calls: devices on which fitted heuristics may serve them."""

from __future__ import annotations

import functools
import os

from tunedgemm.device import Device
from tunedgemm.process.variables import KINDS, read
from tunedgemm.products import measured_near, was_measured

#: The variable that lists the libtypes for untuned calls.
VARIABLE = "TUNEDGEMM_FALLBACK"


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
