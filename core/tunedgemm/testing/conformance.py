"""BackendConformance: the checks that every backend passes, as a pytest class that plugins subclass.

::

    class TestMine(BackendConformance):
        libtype = "mine"

A check covers one op in all its shapes, those of real models and awkward ones, and lists every
fault with its shape and solution. Launching checks run on the present device, with the shapes that
the backend supports there. Without such a shape they skip, with the backend's reason.
"""

from __future__ import annotations

from tunedgemm.testing.launch_checks import LaunchChecks
from tunedgemm.testing.listing_checks import ListingChecks
from tunedgemm.tuner.watching import Poisoned

__all__ = ["BackendConformance", "Poisoned"]


class BackendConformance(LaunchChecks, ListingChecks):
    """The checks that every backend passes. A new one arrives only with a minor version of the core.

    Attributes:
        libtype: the backend under test, found by its entry point.
        device: where to launch; None is the first GPU, else the CPU.
        shapes: the shapes to check, instead of `tunedgemm.testing.shapes.shapes_of` each op.
        max_solutions: how many solutions of a shape are launched, spread over the backend's list.
    """
