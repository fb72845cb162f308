"""The answer to an untuned call."""

from __future__ import annotations

from tunedgemm.plugin import Device, Shape, Solution

from tunedgemm_skinny.solutions import enumerate_solutions

#: Where AITER sends untuned calls here, and to what: rows of x at most, rows of the weight for each compute unit, K at most; K in
#: wholes of 8 (AITER, ``aiter/tuned_gemm.py``).
_GFX = ("gfx90a", "gfx942", "gfx950")
_CLASSES = ((1, 2, 9216), (4, 1, 9216), (8, 1, 5120), (16, 1, 256))
_EIGHT = 8


def heuristic_fallback(libtype: str, shape: Shape, device: Device) -> Solution | None:
    """The first guess for the shapes for which AITER takes its skinny kernels, on the devices where it does; None elsewhere."""
    if shape.op != "a16w16" or device.gfx not in _GFX or shape.k % _EIGHT:
        return None
    units, depth = next(((units, depth) for rows, units, depth in _CLASSES if shape.m <= rows), (0, 0))
    if shape.n > units * device.cu_num or shape.k > depth:
        return None
    return next(iter(enumerate_solutions(libtype, shape, device)), None)
