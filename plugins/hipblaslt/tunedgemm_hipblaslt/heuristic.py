"""Choose the solution of an untuned call."""

from __future__ import annotations

from collections.abc import Callable

from tunedgemm.plugin import Device, Shape, Solution
from tunedgemm.tools.launching import warn_once

from tunedgemm_hipblaslt.abi import Abi
from tunedgemm_hipblaslt.limits import SHUFFLED_LAYOUT, make_problem
from tunedgemm_hipblaslt.names import FIRST, AlgorithmIndex
from tunedgemm_hipblaslt.onlinefile import find_row, is_switched_on

#: Devices on which AITER sends untuned shuffled weights here.
_GFX = ("gfx942",)


def heuristic_fallback(
    shape: Shape, device: Device, abi: Abi, read_build: Callable[[], tuple[int, str]] | None, refusal: Callable[[Solution], str]
) -> Solution | None:
    """Return the solution of an untuned call; None leaves it to torch, which asks the same library.

    AITER's online tuning for this version of the library comes first. Next is the library's first
    answer, for shuffled weights on an MI300 alone.

    Args:
        shape: the call's shape.
        device: the device whose limits count.
        abi: the library.
        read_build: returns version and revision of the library; None for an absent device.
        refusal: returns why the library has no such algorithm for the shape, or "".
    """
    if read_build is not None and not abi.config and is_switched_on():
        version, revision = read_build()
        row = find_row(make_problem(shape), f"{abi.libtype} {version} {revision}")
        if row is not None:
            name = str(AlgorithmIndex(row.index, version, revision)) if row.libver else row.kernel_name
            solution = Solution(abi.libtype, name, solidx=row.index)
            if not (reason := refusal(solution)):
                return solution
            warn_once(f"{row.source}: a row that is not used: {reason}")
    if shape.layout == SHUFFLED_LAYOUT and device.gfx in _GFX and shape.op == "a16w16":
        return Solution(abi.libtype, FIRST)
    return None
