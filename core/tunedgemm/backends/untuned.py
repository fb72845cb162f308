"""Untuned calls: on which devices a backend may serve them by choices that were fitted to times."""

from __future__ import annotations

import functools
import os

from tunedgemm.device import Device
from tunedgemm.process.variables import KINDS, read
from tunedgemm.products import measured_near, was_measured

#: The variable that lists the libtypes of untuned calls.
VARIABLE = "TUNEDGEMM_FALLBACK"


def may_guess(device: Device) -> bool:
    """Tell whether fitted choices may serve untuned calls on a device.

    They may where they were measured, by its units and memory. Elsewhere they may if the user lists
    libtypes in ``TUNEDGEMM_FALLBACK``.
    """
    return was_measured(device) or _lists(os.environ.get(VARIABLE, ""))


@functools.lru_cache(maxsize=16)
def _lists(text: str) -> bool:
    """Tell whether a value of the variable lists libtypes; a bad one counts as the default, not as a list."""
    found = read(VARIABLE, {VARIABLE: text})
    return bool(found) and found is not KINDS[VARIABLE].default


def unmeasured(device: Device) -> str:
    """Return why fitted choices do not serve a device of a measured architecture, else an empty text."""
    measured = measured_near(device)
    if not measured or may_guess(device):
        return ""
    places = ", ".join(product.name for product in measured)
    return f"guesses were measured on {places} alone; {VARIABLE} with a libtype allows them here"
