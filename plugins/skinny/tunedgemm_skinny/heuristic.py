"""Choose the solution of an untuned call."""

from __future__ import annotations

from tunedgemm.plugin import Device, Shape, Solution
from tunedgemm.tools.launching import may_guess, stand_ins

from tunedgemm_skinny.limits import FORMATTED, weight_of
from tunedgemm_skinny.space import enumerate_solutions

#: AITER's classes of untuned calls (AITER, ``aiter/tuned_gemm.py``): most rows of x, most weight
#: rows per compute unit, largest K. K must be a multiple of 8.
_GFX = ("gfx90a", "gfx942", "gfx950")
_CLASSES = ((1, 2, 9216), (4, 1, 9216), (8, 1, 5120), (16, 1, 256))
_EIGHT = 8
#: Classes where the first solution beats F.linear on Hopper: most rows of x; then the range of the
#: weight rows, of K, and of their product.
_HOPPER = (
    (1, (4096, 57344), (1536, 28672), (8192 * 3584, 57344 * 8192)),
    (2, (4096, 8192), (1536, 14336), (8192 * 3584, 10240 * 8192)),
    (1, (64, 1024), (1792, 65536), (0, 6 << 20)),
    (4, (64, 1024), (1792, 7168), (0, 6 << 20)),
)


def heuristic_fallback(libtype: str, shape: Shape, device: Device) -> Solution | None:
    """Return the first solution where it is expected to be faster than torch; None elsewhere.

    AMD: the shapes for which AITER takes its skinny kernels, on the architectures where it does.
    Elsewhere none: a skinny default on RDNA was 36 times too slow (vllm-project/vllm#51511).

    Hopper: the classes where the first solution beat F.linear in nine shapes of ten. Its cost came
    from a fit to all other shapes. Measured in bf16 on one H200, 22 November 2026: 24 weights,
    M of 1, 2, 4, 8, 16, 32, 64. Where the first solution was not timed, the next timed one
    stands for it.

    | weights | M | wins | median, least speedup |
    |---|---|---|---|
    | 56 to 160 MiB | 1, 2 | 15 of 16 | 1.12, 0.95 |
    | above 160 MiB | 1 | 3 of 4 (11 of 12 of all from 56 MiB) | 1.03, 0.94 |
    | below 56 MiB | 1 | 9 of 12 | |
    | below 56 MiB | 2 | 10 of 12 | |
    | below 56 MiB | 4 to 16 | 23 of 45 | |
    | above 160 MiB | 2 to 16 | 7 of 16 | |
    | any | 32 | 2 of 14 | |
    | any | 64 | 4 of 15 | |
    | up to 12 MiB, N up to 1024, K from 1792 (28 November) | 1, 2, 4 | 10 of 11 | 1.6, 0.98 |

    Only the first two rows and the last win often enough. At M = 2 an H200 lost 7 % for N = 10240.
    At M = 4 it lost 5 % for N = 320, K = 8896. From 72 to 160 MiB it won 24 of 25 for M up to 16,
    by 1.05 in the median. Where no other M of the weight was fitted, it reached 0.81 at least. That
    is too little.

    All NVIDIA devices: weights of 4 bits and shuffled weights. In each call torch widens the first
    and reorders the second, with several passes over the weight (mxfp4 on one H200: the first
    solution is 77 to 131 times as fast).
    """
    if device.gfx in _GFX:
        answers = shape.op == "a16w16" and shape.layout == "row" and shape.k % _EIGHT == 0 and _in_aiter_class(shape, device)
    elif device.kind == "amd":
        answers = False
    elif weight_of(shape) == "fp4x2" or shape.op == FORMATTED or shape.layout != "row":
        answers = True
    else:
        fitted = device.gfx == "sm_90" and may_guess(device) and shape.op == "a16w16" and shape.k % _EIGHT == 0
        answers = fitted and all(map(_in_hopper_class, (shape, *(other for other, _ in stand_ins(shape, device)))))
    return next(iter(enumerate_solutions(libtype, shape, device)), None) if answers else None


def _in_aiter_class(shape: Shape, device: Device) -> bool:
    units, depth = next(((units, depth) for rows, units, depth in _CLASSES if shape.m <= rows), (0, 0))
    return shape.n <= units * device.cu_num and shape.k <= depth


def _in_hopper_class(shape: Shape) -> bool:
    sizes = shape.n, shape.k, shape.n * shape.k
    return any(
        shape.m <= rows and all(least <= size <= most for size, (least, most) in zip(sizes, ranges, strict=True))
        for rows, *ranges in _HOPPER
    )
