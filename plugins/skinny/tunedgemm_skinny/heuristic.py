"""The answer to an untuned call."""

from __future__ import annotations

from tunedgemm.plugin import Device, Shape, Solution

from tunedgemm_skinny.solutions import enumerate_solutions

#: Where AITER sends untuned calls here, and to what: rows of x at most, rows of the weight for each compute unit, K at most; K in
#: wholes of 8 (AITER, ``aiter/tuned_gemm.py``).
_GFX = ("gfx90a", "gfx942", "gfx950")
_CLASSES = ((1, 2, 9216), (4, 1, 9216), (8, 1, 5120), (16, 1, 256))
_EIGHT = 8
#: Where the first guess beats F.linear on Hopper: rows of x at most, rows of the weight and K at least and at most, as they were timed.
_HOPPER = ((1, (1280, 8192), (1024, 8192)),)


def heuristic_fallback(libtype: str, shape: Shape, device: Device) -> Solution | None:
    """The first guess where it is expected to be quicker than torch; None elsewhere.

    On AMD's devices for the shapes for which AITER takes its skinny kernels. On Hopper for the classes of which the first guess, by a fit
    to all other shapes, beat F.linear in nine shapes of ten (bf16, one H200, 22 November 2026, ``benchmarks/skinny_fit.py --report``):
    of M = 1 in 4 of 4, by 1.012 at least and 1.112 in the median. Of M = 2 it did so in 0 of 1, of 3 to 4 in 2 of 2, of 5 to 8 in 1 of 1,
    of 9 to 16 in 2 of 5: too few or not often enough.
    """
    if shape.op != "a16w16" or shape.k % _EIGHT:
        return None
    if not (_aiters(shape, device) if device.gfx in _GFX else device.gfx == "sm_90" and _hoppers(shape)):
        return None
    return next(iter(enumerate_solutions(libtype, shape, device)), None)


def _aiters(shape: Shape, device: Device) -> bool:
    units, depth = next(((units, depth) for rows, units, depth in _CLASSES if shape.m <= rows), (0, 0))
    return shape.n <= units * device.cu_num and shape.k <= depth


def _hoppers(shape: Shape) -> bool:
    return any(shape.m <= rows and n[0] <= shape.n <= n[1] and k[0] <= shape.k <= k[1] for rows, n, k in _HOPPER)
