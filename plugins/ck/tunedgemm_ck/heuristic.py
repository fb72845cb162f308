"""Choose the solution of an untuned call."""

from __future__ import annotations

import contextlib

from tunedgemm.plugin import Device, PluginError, Shape, Solution

from tunedgemm_ck import launch
from tunedgemm_ck.build import targets_of
from tunedgemm_ck.family import Family
from tunedgemm_ck.names import solution_of
from tunedgemm_ck.problem import problem_of
from tunedgemm_ck.toolchain import Finder


def heuristic_fallback(family: Family, finder: Finder, shape: Shape, device: Device) -> Solution | None:
    """Return the best instance that is expected to beat torch, or None.

    On a present device its object must be stored: compiling would stop a server for a minute.
    """
    for candidate in family.enumerate_untuned(shape, device):
        with contextlib.suppress(PluginError):
            if device.is_present:
                launch.check_objects(targets_of(family, candidate[0], problem_of(shape, device.gfx), finder))
            return solution_of(family, candidate)
    return None
