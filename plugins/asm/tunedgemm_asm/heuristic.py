"""Choose the solution of an untuned call."""

from __future__ import annotations

from tunedgemm.plugin import Device, Shape, Solution

from tunedgemm_asm.cost import rank
from tunedgemm_asm.limits import Kernels, unfit
from tunedgemm_asm.manifest import KernelConfig
from tunedgemm_asm.names import Candidate, auto_splits, solution_of

#: Layout and tile of a kernel that AITER's launcher chooses only for whole tiles of N.
_WHOLE = ("aiter-f4gemm", 128, 512)


def heuristic_fallback(libtype: str, shape: Shape, device: Device, kernels: Kernels) -> Solution | None:
    """Return the first guess for a shuffled weight, which torch would reorder in each call, else None.

    No class of plain weights was measured.
    """
    if shape.layout == "row":
        return None
    chosen = guess(shape, device, kernels)
    return solution_of(libtype, *chosen) if chosen else None


def guess(shape: Shape, device: Device, kernels: Kernels) -> Candidate | None:
    """Return the best kernel by `rank` with the splits of AITER's launcher, or None.

    Only AITER's kernels are candidates, because they run in production. The code object is checked.
    """

    def ragged(kernel: KernelConfig) -> bool:  # a tail in N that AITER's launcher avoids
        return (kernel.abi, kernel.tile_m, kernel.tile_n) == _WHOLE and shape.n % kernel.tile_n != 0

    fitting = []
    for pack_kernel in kernels.values():
        if pack_kernel.of_aiter and shape.op in pack_kernel.abi.ops and not ragged(pack_kernel.kernel):
            splits = auto_splits(pack_kernel.kernel, shape, device)
            if not unfit(pack_kernel, splits, shape):
                fitting.append((rank(pack_kernel.kernel, splits, shape, device), pack_kernel, splits))
    for _, pack_kernel, splits in sorted(fitting, key=lambda ranked: ranked[0]):
        if not pack_kernel.unfit():
            return pack_kernel.kernel, splits
    return None
