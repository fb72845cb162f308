"""Choose the solution of an untuned call on Hopper in batch-invariant mode."""

from __future__ import annotations

import functools

import attrs
from tunedgemm.plugin import Device, Shape, Solution

from tunedgemm_asm.limits import ceil_div
from tunedgemm_asm.ptx.heuristic import guess_of
from tunedgemm_asm.ptx.limits import MOST_SIZE
from tunedgemm_asm.ptx.space import Candidate
from tunedgemm_asm.ptx.sums import solution_of

#: Rows of x up to which, and the multiples to which, they are rounded up before a guess is judged.
_STEPS, _MANY_STEP = ((256, 8), (2048, 64)), 512


def invariant_fallback(libtype: str, shape: Shape, device: Device) -> Solution | None:
    """Return the best guess of the weight's order of sums.

    That is the same for every M. fp8 sums are promoted, as exact as torch's.
    """
    step = next((step for rows, step in _STEPS if shape.m <= rows), _MANY_STEP)
    guess = _guess(attrs.evolve(shape, m=min(ceil_div(shape.m, step) * step, MOST_SIZE)), device)
    return solution_of(libtype, *guess, shape) if guess else None


@functools.lru_cache(maxsize=4096)
def _guess(shape: Shape, device: Device) -> Candidate | None:
    """Return the kernel and splits of the least predicted time; sums of int8 are exact in any parts."""
    return guess_of(shape, device, 0 if shape.dtype == "int8" else 1)
