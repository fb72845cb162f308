"""Map between solutions and AMD kernels with their splits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunedgemm.plugin import Device, PluginError, Shape, Solution

from tunedgemm_asm.limits import RULES, ceil_div, unfit
from tunedgemm_asm.manifest import KernelConfig

if TYPE_CHECKING:
    from tunedgemm_asm.packs import Catalog

#: A kernel and its number of splits.
Candidate = tuple[KernelConfig, int]


def auto_splits(kernel: KernelConfig, shape: Shape, device: Device) -> int:
    """Return the splits that AITER's launchers choose: enough to fill the compute units, limited by
    K.
    """
    if not kernel.splits or RULES[kernel.abi].meet != "semaphore":
        return 1
    return max(2, most_splits(kernel, shape, device))


def most_splits(kernel: KernelConfig, shape: Shape, device: Device) -> int:
    """Return the most splits that the compute units, the kernel and the steps of K allow."""
    tiles = ceil_div(shape.m, kernel.tile_m) * ceil_div(shape.n, kernel.tile_n)
    return min(max(device.cu_num, 1) // tiles, RULES[kernel.abi].splits, shape.k // kernel.sub_k)


def solution_of(libtype: str, kernel: KernelConfig, splits: int) -> Solution:
    """Return the solution of a kernel; splitK is written as in AITER's rows, for fp4 as a
    logarithm.

    AITER's kernels add more than two splits in an order that varies; the plugin's own in a fixed
    one.
    """
    rules = RULES[kernel.abi]
    written = splits.bit_length() - 1 if rules.parts == "even" else splits
    return Solution(libtype, kernel.name, written, deterministic=splits <= 2 or rules.ordered)


def resolve(solution: Solution, shape: Shape, device: Device, catalog: Catalog) -> Candidate:
    """Return the kernel and the splits that a solution names; splitK 0 or none means `auto_splits`.

    Raises:
        PluginError: the device has no such kernel, or the kernel does not support the shape.
    """
    if solution.kernel_name not in catalog.kernels:
        raise PluginError(catalog.missing(solution.kernel_name))
    pack_kernel = catalog.kernels[solution.kernel_name]
    splits = _splits(solution, pack_kernel.kernel, shape, device)
    if reason := unfit(pack_kernel, splits, shape):
        raise PluginError(reason)
    return pack_kernel.kernel, splits


def _splits(solution: Solution, kernel: KernelConfig, shape: Shape, device: Device) -> int:
    rules, written = RULES[kernel.abi], solution.split_k
    if rules.parts == "even":
        return 1 << min(max(written, 0), rules.splits)  # a count above the limit is refused later
    if not written:
        return auto_splits(kernel, shape, device)
    # AITER's launcher clamps splits to the steps of K where they are counted in steps.
    return min(written, rules.splits, shape.k // kernel.sub_k) if rules.parts == "counted" else written
