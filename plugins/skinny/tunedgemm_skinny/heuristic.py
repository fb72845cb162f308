"""The answer to an untuned call."""

from __future__ import annotations

from tunedgemm.plugin import Device, Shape, Solution

from tunedgemm_skinny.limits import weight_of
from tunedgemm_skinny.solutions import enumerate_solutions

#: Where AITER sends untuned calls here, and to what: rows of x at most, rows of the weight for each compute unit, K at most; K in
#: wholes of 8 (AITER, ``aiter/tuned_gemm.py``).
_GFX = ("gfx90a", "gfx942", "gfx950")
_CLASSES = ((1, 2, 9216), (4, 1, 9216), (8, 1, 5120), (16, 1, 256))
_EIGHT = 8
#: Where the first guess beats F.linear on Hopper: rows of x at most; rows of the weight, K, and their product, at least and at most.
_HOPPER = (
    (1, (4096, 57344), (1536, 28672), (8192 * 3584, 57344 * 8192)),
    (2, (4096, 24576), (1536, 14336), (8192 * 3584, 10240 * 8192)),
)


def heuristic_fallback(libtype: str, shape: Shape, device: Device) -> Solution | None:
    """The first guess where it is expected to be quicker than torch; None elsewhere.

    On AMD's devices for the shapes for which AITER takes its skinny kernels. On Hopper for the classes of which the first guess, by a fit
    to all other shapes, beat F.linear in nine shapes of ten (bf16, one H200, 22 November 2026, 24 weights, M of 1, 2, 4, 8, 16, 32, 64;
    where the first of the list was not timed, the next that was stands for it). With weights of 56 MiB to 160 MiB for M up to 2 in 15 of
    16 (median 1.12, least 0.95), above that for M = 1 in 3 of 4 (1.03, 0.94; of all from 56 MiB in 11 of 12). Not often enough: smaller
    weights for M = 1 in 9 of 12, for M = 2 in 10 of 12, for M of 4 to 16 in 23 of 45, larger ones for M of 2 to 16 in 7 of 16; M = 32 in 2
    of 14, M = 64 in 4 of 15. Of 72 MiB to 160 MiB for M up to 16 it was 24 of 25, but by 1.05 in the median and 0.81 at least where no
    other M of the weight was fitted: too little for an answer that nobody has timed.

    On NVIDIA's devices torch widens a weight of mxfp4, and puts a shuffled one in order, in each call, and so reads and writes it several
    times: there the first guess answers for both (mxfp4, one H200: 77 to 131 times as quick).
    """
    if device.gfx in _GFX:
        answers = shape.op == "a16w16" and shape.layout == "row" and shape.k % _EIGHT == 0 and _aiters(shape, device)
    elif weight_of(shape) == "fp4x2" or shape.layout != "row":
        answers = True
    else:
        answers = device.gfx == "sm_90" and shape.op == "a16w16" and shape.k % _EIGHT == 0 and _hoppers(shape)
    return next(iter(enumerate_solutions(libtype, shape, device)), None) if answers else None


def _aiters(shape: Shape, device: Device) -> bool:
    units, depth = next(((units, depth) for rows, units, depth in _CLASSES if shape.m <= rows), (0, 0))
    return shape.n <= units * device.cu_num and shape.k <= depth


def _hoppers(shape: Shape) -> bool:
    sizes = shape.n, shape.k, shape.n * shape.k
    return any(
        shape.m <= rows and all(least <= size <= most for size, (least, most) in zip(sizes, ranges, strict=True))
        for rows, *ranges in _HOPPER
    )
