"""Return the solution of a kernel, and the kernel and splits that a solution names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunedgemm.plugin import Device, PluginError, Shape, Solution

from tunedgemm_asm.limits import RULES, ceil_div, unsupported
from tunedgemm_asm.manifest import KernelConfig

if TYPE_CHECKING:
    from tunedgemm_asm.packs import Catalog

#: A kernel and its number of splits.
Candidate = tuple[KernelConfig, int]


def auto_splits(kernel: KernelConfig, shape: Shape, device: Device) -> int:
    """The number of parts that AITER's launchers choose where none is named: what fills the compute units, if K has as many steps."""
    if not kernel.splits or RULES[kernel.abi].meet != "semaphore":
        return 1
    return max(2, most_splits(kernel, shape, device))


def most_splits(kernel: KernelConfig, shape: Shape, device: Device) -> int:
    """Return the most splits that the compute units, the kernel and the steps of K allow."""
    tiles = ceil_div(shape.m, kernel.tile_m) * ceil_div(shape.n, kernel.tile_n)
    return min(max(device.cu_num, 1) // tiles, RULES[kernel.abi].splits, shape.k // kernel.sub_k)


def solution_of(libtype: str, kernel: KernelConfig, splits: int) -> Solution:
    """The solution of a kernel; splitK as AITER's rows have it: the number of parts, of fp4 its logarithm.

    AITER's kernels add parts of K to zeros in the order in which they end, which two parts do not show; ours in one order.
    """
    rules = RULES[kernel.abi]
    written = splits.bit_length() - 1 if rules.parts == "even" else splits
    return Solution(libtype, kernel.name, written, deterministic=splits <= 2 or rules.ordered)


def resolve(solution: Solution, shape: Shape, device: Device, catalog: Catalog) -> Candidate:
    """The kernel that a solution names, and the parts of K that its splitK means; 0 or nothing leaves them to `auto_splits`.

    Raises:
        PluginError: there is no such kernel for the device, or it does not take the shape so.
    """
    if solution.kernel_name not in catalog.kernels:
        raise PluginError(catalog.missing(solution.kernel_name))
    pack_kernel = catalog.kernels[solution.kernel_name]
    splits = _splits(solution, pack_kernel.kernel, shape, device)
    if reason := unsupported(pack_kernel, splits, shape):
        raise PluginError(reason)
    return pack_kernel.kernel, splits


def _splits(solution: Solution, kernel: KernelConfig, shape: Shape, device: Device) -> int:
    rules, written = RULES[kernel.abi], solution.split_k
    if rules.parts == "even":
        return 1 << min(max(written, 0), rules.splits)  # too many are refused by their number
    if not written:
        return auto_splits(kernel, shape, device)
    # AITER's launcher lowers what is too much for K where parts count steps.
    return min(written, rules.splits, shape.k // kernel.sub_k) if rules.parts == "counted" else written
