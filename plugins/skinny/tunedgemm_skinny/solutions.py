"""Solutions: which kernels are worth timing for a shape, best guesses first, and their neighbours."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import attrs
from tunedgemm.plugin import Device, PluginError, Shape, Solution

from tunedgemm_skinny.cost import cost_of
from tunedgemm_skinny.fit import MAX_ROWS, ceil_div, per_split, refusal, registers, span_of, threads_of
from tunedgemm_skinny.limits import ARCHITECTURES, batches_of, supports
from tunedgemm_skinny.names import Kernel, Rows, Tiles, kernel_of

#: Most solutions of one shape.
MOST = 60

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)

#: Values of parameters that are listed, where not all are; `refine` goes to the others.
_LISTED = {"stages": (0, 2, 4)}
#: Steps from which loads count as deep.
_DEEP = 4
#: Warps of a block at most, and of all blocks for each multiprocessor at least and at most; where there are fewer, whatever there is.
_WARPS = 16
_FEWEST, _MANY = 4, 512


def choices(shape: Shape, device: Device) -> Iterator[tuple[Kernel, int]]:
    """Kernels with numbers of splits, each once, at most `MOST`, those that cannot fit left out.

    The best of each way to load comes first, then the second of each, and so on: what is near a good one is found by `refine`.
    """
    if not supports(shape, device):
        return
    found = [chosen for chosen in _all(shape, device) if fits(*chosen, shape, device)]
    ranked = sorted(found, key=lambda chosen: (cost_of(*chosen, shape, device), chosen[0].name, chosen[1]))
    groups: dict[tuple[str, int, bool, bool, bool], list[tuple[Kernel, int]]] = {}
    for kernel, splits in ranked:
        way = (kernel.family, kernel.n_each, kernel.unroll < _DEEP, kernel.x_shared, kernel.stages > 0)
        groups.setdefault(way, []).append((kernel, splits))
    by_rank = itertools.chain.from_iterable(itertools.zip_longest(*groups.values()))
    yield from itertools.islice((chosen for chosen in by_rank if chosen is not None), MOST)


def enumerate_solutions(libtype: str, shape: Shape, device: Device) -> Iterator[Solution]:
    """The solutions of a shape, best guesses first."""
    for kernel, splits in choices(shape, device):
        yield solution_of(libtype, kernel, splits)


def refine(solution: Solution, shape: Shape, device: Device) -> Iterator[Solution]:
    """The neighbours of a solution: one parameter, or splitK, moved one step of its ladder."""
    try:
        kernel = kernel_of(solution.kernel_name)
    except PluginError:
        return
    if not supports(shape, device):
        return
    splits = solution.split_k or 1
    near: list[tuple[Kernel, int]] = [(kernel, other) for other in _beside(SPLITS, splits)]
    for field in attrs.fields(type(kernel)):
        value = getattr(kernel, field.name)
        for step in _beside(field.metadata["ladder"], value):
            with contextlib.suppress(PluginError):  # more warps than a block has
                near.append((attrs.evolve(kernel, **{field.name: step}), splits))
    for changed, parts in near:
        if fits(changed, parts, shape, device):
            yield solution_of(solution.libtype, changed, parts)


def fits(kernel: Kernel, splits: int, shape: Shape, device: Device) -> bool:
    """Whether a kernel is possible, fits the registers, and leaves no warp without work."""
    if refusal(kernel, splits, shape, device.gfx):
        return False
    architecture, span = ARCHITECTURES[device.gfx], span_of(kernel, shape.dtype, device.gfx)
    share = per_split(kernel, splits, shape, device.gfx)
    works = (kernel.warps_k - 1) * span < share and (kernel.warps_n - 1) * kernel.each < shape.n and (kernel.unroll == 1 or span <= share)
    most = min(architecture.registers, architecture.register_file // threads_of(kernel, device.gfx))
    return works and registers(kernel, shape, device.gfx) <= most


def solution_of(libtype: str, kernel: Kernel, splits: int) -> Solution:
    """The solution of a kernel; its sums are added in one order, whatever M."""
    return Solution(libtype, kernel.name, splits if splits > 1 else 0, batch_invariant=True)


def _beside(ladder: tuple[int, ...], value: int) -> list[int]:
    below, above = [step for step in ladder if step < value], [step for step in ladder if step > value]
    return below[-1:] + above[:1]


def _all(shape: Shape, device: Device) -> Iterator[tuple[Kernel, int]]:
    """Every kernel of a few warps a block, with the numbers of splits that give the device enough warps and not too many."""
    families: tuple[type[Kernel], ...] = (Rows, Tiles) if shape.m <= MAX_ROWS and shape.scale != "block" else (Tiles,)
    for family in families:
        fields = attrs.fields(family)
        for values in itertools.product(*(_LISTED.get(field.name, field.metadata["ladder"]) for field in fields)):
            parameters = dict(zip((field.name for field in fields), values, strict=True))
            if parameters["warps_n"] * parameters["warps_k"] > _WARPS:
                continue
            kernel = family(**parameters)
            warps = batches_of(shape) * ceil_div(shape.n, kernel.per_block) * kernel.warps / max(device.cu_num, 1)
            for splits in SPLITS:
                if splits == 1 or (_FEWEST <= warps * splits <= _MANY and warps < 2 * _FEWEST):
                    yield kernel, splits
