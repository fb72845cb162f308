"""List the settings worth timing for a shape, and the neighbours of one."""

from __future__ import annotations

import math
from collections.abc import Iterator

import attrs
from tunedgemm.plugin import Device, PluginError, Shape, Solution
from tunedgemm.tools.launching import scale_order

from tunedgemm_deepgemm.names import EXPERT_ROWS, EXPERTS, LIBRARY_ROWS, Kernel, parse_name, unfit

#: Multiples of block N that are listed; 0 is the library's choice.
BLOCKS = (0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 192, 224, 256)
_LISTED = (64, 128, 32, 96, 192, 256)
#: SMs left to others, in the order of the ladder: a kernel of fewer blocks needs fewer.
_LEFT = (0, 4, 12, 20, 36)
#: Rows of x, fewest multiplications and device of untuned products by block for which 2.8.1's own
#: choice was faster than asm's guess: 1.03 to 1.10 times in five products of an H200 (28 November
#: 2026). It was slower for two of four smaller ones, and 2.5.0's for all four of an H100.
_UNTUNED, _WORK, _DEVICE = range(1024, 8193), 25 * 10**9, "nvidia-h200"


def enumerate_solutions(libtype: str, shape: Shape, device: Device) -> Iterator[Solution]:
    """Yield the library's own choice first, then overlapping launches and other blocks."""
    if shape.op == EXPERTS:
        yield from _solutions(libtype, expert_kernels(shape) if shape.m else [Kernel()], shape, device)
        return
    kernels = [Kernel(), Kernel(pdl=True), *(Kernel(block_n=block) for block in _LISTED if block <= max(shape.n, 32))]
    yield from _solutions(libtype, kernels if shape.m else kernels[:1], shape, device)


def choose_untuned(libtype: str, shape: Shape, device: Device) -> Solution | None:
    """Return the library's own choice where it was measured to be the fastest, scales in place."""
    in_place = scale_order(shape) == "m_major_padded" or (scale_order(shape) == "m_major" and shape.m % 4 == 0)
    answers = shape.op == "a8w8_blockscale" and in_place and device.name == _DEVICE
    return Solution(libtype, Kernel().name) if answers and shape.m in _UNTUNED and shape.m * shape.n * shape.k >= _WORK else None


def expert_kernels(shape: Shape) -> list[Kernel]:
    """Return the library's choice, then sizes of blocks of experts, overlapping launches, and blocks N.

    Blocks of fewer rows come first after it where experts have few pairs each.
    """
    mean = shape.m * int(shape["topk"]) / int(shape["expert"])
    sizes = sorted((rows for rows in EXPERT_ROWS if rows != LIBRARY_ROWS), key=lambda rows: abs(math.log2(rows / max(mean, 1))))
    first = Kernel() if mean > sizes[-1] else Kernel(rows=sizes[0])
    kernels = [Kernel(), *(Kernel(rows=rows) for rows in sizes), Kernel(masked=True)]
    kernels += [Kernel(spill=True), Kernel(rows=sizes[0], spill=True)] * (mean > sizes[-1])
    kernels += [attrs.evolve(base, pdl=True) for base in dict.fromkeys((first, Kernel(masked=True)))]
    return kernels + [attrs.evolve(base, block_n=block) for block in (128, 64, 192) for base in dict.fromkeys((Kernel(), first))]


def refine(solution: Solution, shape: Shape, device: Device) -> Iterator[Solution]:
    """Yield the solutions that differ in one setting by one step.

    Each compiles for seconds. So none adds an overlapping launch, which gained no more than the
    noise. None combines fewer SMs and M as a constant, which gain 0.5 % each.
    """
    try:
        kernel = parse_name(solution.kernel_name)
    except PluginError:
        return
    near = [attrs.evolve(kernel, pdl=False)] * kernel.pdl + [attrs.evolve(kernel, mnk=not kernel.mnk)] * (not kernel.sms)
    near += [attrs.evolve(kernel, spill=not kernel.spill)]
    near += [attrs.evolve(kernel, block_n=block) for block in _adjacent(BLOCKS, kernel.block_n)]
    if shape.op == EXPERTS and not kernel.masked:
        rows = _adjacent(EXPERT_ROWS, kernel.expert_rows)
        near += [attrs.evolve(kernel, rows=count % LIBRARY_ROWS) for count in rows]
    sms = () if kernel.mnk else tuple(device.cu_num - left for left in _LEFT if left < device.cu_num)
    near += [attrs.evolve(kernel, sms=count % device.cu_num) for count in _adjacent(sms, kernel.sms or device.cu_num)]
    yield from _solutions(solution.libtype, near if shape.m else [], shape, device)


def _solutions(libtype: str, kernels: list[Kernel], shape: Shape, device: Device) -> Iterator[Solution]:
    yield from (Solution(libtype, kernel.name) for kernel in kernels if not unfit(kernel, shape, device))


def _adjacent(ladder: tuple[int, ...], value: int) -> tuple[int, ...]:
    """Return the values before and after one of a ladder; none for a value that is not on it."""
    if value not in ladder:
        return ()
    position = ladder.index(value)
    return (*ladder[max(position - 1, 0) : position], *ladder[position + 1 : position + 2])
