"""The answer to an untuned call."""

from __future__ import annotations

from tunedgemm.plugin import Device, Shape, Solution

from tunedgemm_hipblaslt.abi import Abi
from tunedgemm_hipblaslt.limits import LAYOUT
from tunedgemm_hipblaslt.names import FIRST

#: Where AITER sends shuffled weights here unless they are tuned.
_GFX = ("gfx942",)


def heuristic_fallback(shape: Shape, device: Device, abi: Abi) -> Solution | None:
    """The library's own first answer for a shuffled weight on an MI300; elsewhere None, for torch asks the same library."""
    if shape.layout == LAYOUT and device.gfx in _GFX and shape.op == "a16w16":
        return Solution(abi.libtype, FIRST)
    return None
