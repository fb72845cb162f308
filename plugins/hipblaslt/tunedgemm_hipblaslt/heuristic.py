"""The answer to an untuned call."""

from __future__ import annotations

from collections.abc import Callable

from tunedgemm.plugin import Device, Shape, Solution

from tunedgemm_hipblaslt.abi import Abi
from tunedgemm_hipblaslt.limits import LAYOUT
from tunedgemm_hipblaslt.names import FIRST, Numbered
from tunedgemm_hipblaslt.onlinefile import named_for, switched_on
from tunedgemm_hipblaslt.problem import problem_of

#: Where AITER sends shuffled weights here unless they are tuned.
_GFX = ("gfx942",)


def heuristic_fallback(shape: Shape, device: Device, abi: Abi, present: Callable[[], tuple[int, str]] | None) -> Solution | None:
    """What AITER's online tuning chose for this version of the library, else its first answer for a shuffled weight on an MI300.

    None elsewhere: torch asks the same library.

    Args:
        shape, device, abi: what is asked, where, and which library.
        present: gives version and revision of the library on a device that is present; None for an absent one.
    """
    if present is not None and not abi.config and switched_on():
        version, revision = present()
        number = named_for(problem_of(shape), f"{abi.libtype} {version} {revision}")
        if number is not None:
            return Solution(abi.libtype, str(Numbered(number, version, revision)), solidx=number)
    if shape.layout == LAYOUT and device.gfx in _GFX and shape.op == "a16w16":
        return Solution(abi.libtype, FIRST)
    return None
