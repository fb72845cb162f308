"""List the solutions of a shape: every kernel with every number of splits worth timing, best guess
first.
"""

from __future__ import annotations

from collections.abc import Iterator

from tunedgemm.plugin import Device, Shape, Solution

from tunedgemm_asm.cost import rank
from tunedgemm_asm.limits import RULES, Kernels, unfit
from tunedgemm_asm.manifest import KernelConfig
from tunedgemm_asm.names import Candidate, most_splits, solution_of

#: Most splits that AITER's tuner tries on an output; most splits tried beyond the compute units.
_TRIED, _FEW = 8, 4


def enumerate_candidates(shape: Shape, device: Device, kernels: Kernels) -> list[Candidate]:
    """Return the fitting kernels with their splits, in the order of `rank`."""
    fitting = [
        (pack_kernel.kernel, splits)
        for pack_kernel in kernels.values()
        if shape.op in pack_kernel.abi.ops
        for splits in splits_of(pack_kernel.kernel, shape, device)
        if not unfit(pack_kernel, splits, shape)
    ]
    return sorted(fitting, key=lambda chosen: rank(chosen[0], chosen[1], shape, device))


def splits_of(kernel: KernelConfig, shape: Shape, device: Device) -> list[int]:
    """Return the numbers of splits worth timing."""
    rules = RULES[kernel.abi]
    if not kernel.splits:
        return [1]
    if rules.meet == "semaphore":
        return list(range(2, max(most_splits(kernel, shape, device), min(_FEW, rules.splits, shape.k // kernel.sub_k)) + 1))
    return [splits for splits in range(1, _TRIED + 1) if rules.parts != "even" or splits & (splits - 1) == 0]


def enumerate_solutions(libtype: str, shape: Shape, device: Device, kernels: Kernels) -> Iterator[Solution]:
    """Yield the solutions of a shape, best guess first."""
    for kernel, splits in enumerate_candidates(shape, device, kernels):
        yield solution_of(libtype, kernel, splits)
