"""Choose the solution of an untuned call on Hopper in batch-invariant mode."""

from __future__ import annotations

import contextlib
import functools
import math

import attrs
from tunedgemm.plugin import Device, PluginError, Shape, Solution

from tunedgemm_asm.ptx.heuristic import guess_of, predicted_us, rounded
from tunedgemm_asm.ptx.limits import MOST_SIZE, unfit
from tunedgemm_asm.ptx.names import ELEMENT_BYTES, KernelConfig
from tunedgemm_asm.ptx.space import MOST_SWAPPED, Candidate, enumerate_stages, enumerate_tiles
from tunedgemm_asm.ptx.sums import solution_of

#: Rows of x up to which, and the multiples to which, they are rounded up before a guess is judged.
_STEPS, _MANY_STEP = ((256, 8), (2048, 64)), 512
#: Rows of x by whose predicted times the parts of K of a weight are chosen, and the parts.
_JUDGED, _PARTS = (1, 8, 32, 128, 1024, 8192), (2, 3, 4, 6, 8)
#: Most rows of the weight for each multiprocessor, and least K, with which parts may pay: others
#: fill the multiprocessors without. The mean gain that is required.
_NARROW, _DEEP, _GAIN = 16, 2048, 1.05
#: Whether kernels that add parts in registers serve untuned calls: so far they have run in an
#: emulator alone, and without them parts cannot serve every M.
FOLDED_SERVES = False
#: Most bytes of partials in memory; a kernel without them serves more rows of x.
_PARTIALS = 1 << 26


def invariant_fallback(libtype: str, shape: Shape, device: Device) -> Solution | None:
    """Return the best guess of the weight's order of sums, which is the same for every M.

    fp8 sums are promoted, as exact as torch's.
    """
    guess = _guess(rounded(shape, _STEPS, _MANY_STEP), device, _parts_of(attrs.evolve(shape, m=1), device))
    return solution_of(libtype, *guess, shape) if guess else None


@functools.lru_cache(maxsize=1024)
def _parts_of(weight: Shape, device: Device) -> int:
    """Return the parts of K of a weight, the same for every M; 0 leaves them free: int8 sums are exact.

    Parts give few rows of x more multiprocessors, and take time to add. They are chosen by the mean
    gain over several M. fp8 has none: registers do not hold a third set of sums.
    """
    if weight.dtype == "int8":
        return 0
    if ELEMENT_BYTES[weight.dtype] == 1 or weight.n > _NARROW * device.cu_num or weight.k < _DEEP:
        return 1
    best = min(_PARTS, key=lambda parts: _judged(weight, device, parts))
    return best if _judged(weight, device, 1) > _judged(weight, device, best) + math.log(_GAIN) else 1


@functools.lru_cache(maxsize=64)
def _judged(weight: Shape, device: Device, parts: int) -> float:
    """Return the mean logarithm of predicted microseconds; infinity if some M has no kernel."""
    shapes = [rounded(attrs.evolve(weight, m=m), _STEPS, _MANY_STEP) for m in (*_JUDGED, MOST_SIZE)]
    guesses = [_guess(shape, device, parts) for shape in shapes]
    times = [predicted_us(*guess, shape, device) for guess, shape in zip(guesses, shapes, strict=True) if guess]
    return sum(map(math.log, times[:-1])) / len(_JUDGED) if len(times) == len(shapes) else math.inf


@functools.lru_cache(maxsize=4096)
def _guess(shape: Shape, device: Device, parts: int) -> Candidate | None:
    """Return the kernel and splits of the least predicted time, of those with so many parts of K."""
    small = parts < 2 or 4 * parts * shape.m * shape.n <= _PARTIALS
    found = [guess_of(shape, device, parts)] if small else []
    if parts > 1 and shape.m > MOST_SWAPPED and FOLDED_SERVES:
        found += [(config, parts) for config in _folded(shape.dtype) if not unfit(config, parts, shape)]
    return min((each for each in found if each), key=lambda guess: predicted_us(*guess, shape, device), default=None)


@functools.lru_cache(maxsize=8)
def _folded(dtype: str) -> tuple[KernelConfig, ...]:
    """Return the tiles of kernels that add parts of K in registers."""
    found: list[KernelConfig] = []
    for tile in enumerate_tiles(Shape("a16w16", MOST_SWAPPED + 1, 1, 1, dtype, dtype), False):
        with contextlib.suppress(PluginError):  # too few registers
            found += [attrs.evolve(tile, stages=stages, folded=True) for stages in enumerate_stages(tile)[:1]]
    return tuple(found)
