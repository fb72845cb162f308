"""Solutions: every kernel that takes a shape, with every number of parts of K worth timing, best guesses first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tunedgemm.plugin import Device, PluginError, Shape, Solution

from tunedgemm_asm.limits import RULES, Kernels, ceil_div, refused, supports
from tunedgemm_asm.manifest import Kernel

if TYPE_CHECKING:
    from tunedgemm_asm.packs import Found

Chosen = tuple[Kernel, int]

#: Parts of K at most that AITER's tuner tries where they are added to the output, and where they need not be more than units.
_TRIED, _FEW = 8, 4


def choices(shape: Shape, device: Device, kernels: Kernels) -> list[Chosen]:
    """Kernels with their parts of K, all of which fit, in the order of `rank`."""
    if not supports(shape, device, kernels):
        return []
    fitting = [
        (loaded.kernel, splits)
        for loaded in kernels.values()
        if shape.op in loaded.abi.ops
        for splits in splits_of(loaded.kernel, shape, device)
        if not refused(loaded, splits, shape)
    ]
    return sorted(fitting, key=lambda chosen: rank(chosen[0], chosen[1], shape, device))


def rank(kernel: Kernel, splits: int, shape: Shape, device: Device) -> tuple[float | str, ...]:
    """What AITER's launchers compare, as a total order, least first.

    Rounds of workgroups over the compute units, then units idle in the last one, then rows computed for nothing, then the tile's elements
    for each that it loads, most first; then fewer parts and the name, so that no order of a manifest decides.
    """
    tiles, units = ceil_div(shape.m, kernel.tile_m) * ceil_div(shape.n, kernel.tile_n), max(device.cu_num, 1)
    rounds, loaded = ceil_div(tiles * splits, units), kernel.tile_m + kernel.tile_n
    return (
        rounds,
        rounds * units - tiles * splits,
        -shape.m % kernel.tile_m,
        -kernel.tile_m * kernel.tile_n / loaded,
        splits,
        kernel.name,
    )


def splits_of(kernel: Kernel, shape: Shape, device: Device) -> list[int]:
    """Numbers of parts of K worth timing."""
    rules = RULES[kernel.abi]
    if not kernel.splits:
        return [1]
    if rules.meet == "semaphore":
        return list(range(2, max(_most(kernel, shape, device), min(_FEW, rules.splits, shape.k // kernel.sub_k)) + 1))
    return [splits for splits in range(1, _TRIED + 1) if rules.parts != "even" or splits & (splits - 1) == 0]


def auto_splits(kernel: Kernel, shape: Shape, device: Device) -> int:
    """The number of parts that AITER's launchers choose where none is named: what fills the compute units, if K has as many steps."""
    if not kernel.splits or RULES[kernel.abi].meet != "semaphore":
        return 1
    return max(2, _most(kernel, shape, device))


def _most(kernel: Kernel, shape: Shape, device: Device) -> int:
    tiles = ceil_div(shape.m, kernel.tile_m) * ceil_div(shape.n, kernel.tile_n)
    return min(max(device.cu_num, 1) // tiles, RULES[kernel.abi].splits, shape.k // kernel.sub_k)


def enumerate_solutions(libtype: str, shape: Shape, device: Device, kernels: Kernels) -> Iterator[Solution]:
    """The solutions of a shape, best guesses first."""
    for kernel, splits in choices(shape, device, kernels):
        yield solution_of(libtype, kernel, splits)


def solution_of(libtype: str, kernel: Kernel, splits: int) -> Solution:
    """The solution of a kernel; splitK as AITER's rows have it: the number of parts, of fp4 its logarithm.

    AITER's kernels add parts of K to zeros in the order in which they end, which two parts do not show; ours in one order.
    """
    rules = RULES[kernel.abi]
    written = splits.bit_length() - 1 if rules.parts == "even" else splits
    return Solution(libtype, kernel.name, written, deterministic=splits <= 2 or rules.ordered)


def resolve(solution: Solution, shape: Shape, device: Device, found: Found) -> Chosen:
    """The kernel that a solution names, and the parts of K that its splitK means; 0 or nothing leaves them to `auto_splits`.

    Raises:
        PluginError: there is no such kernel for the device, or it does not take the shape so.
    """
    if solution.kernel_name not in found.kernels:
        raise PluginError(found.missing(solution.kernel_name))
    loaded = found.kernels[solution.kernel_name]
    splits = _splits(solution, loaded.kernel, shape, device)
    if reason := refused(loaded, splits, shape):
        raise PluginError(reason)
    return loaded.kernel, splits


def _splits(solution: Solution, kernel: Kernel, shape: Shape, device: Device) -> int:
    rules, written = RULES[kernel.abi], solution.split_k
    if rules.parts == "even":
        return 1 << min(max(written, 0), rules.splits)  # too many are refused by their number
    if not written:
        return auto_splits(kernel, shape, device)
    # AITER's launcher lowers what is too much for K where parts count steps.
    return min(written, rules.splits, shape.k // kernel.sub_k) if rules.parts == "counted" else written
