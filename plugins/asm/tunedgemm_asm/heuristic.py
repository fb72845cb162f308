"""Choose the solution of an untuned call."""

from __future__ import annotations

import attrs
from tunedgemm.plugin import Device, Shape, Solution

from tunedgemm_asm.cost import rank
from tunedgemm_asm.limits import Kernels, unfit, unsupported
from tunedgemm_asm.manifest import KernelConfig
from tunedgemm_asm.names import Candidate, auto_splits, solution_of


@attrs.frozen
class Fitted:
    """Class of products with plain weights whose first guess was measured to beat torch.

    Attributes:
        gfx: architecture.
        m: fewest and most rows of x.
        n_below: exclusive limit of N.
        source: measurement, place and date.
    """

    gfx: str
    m: tuple[int, int]
    n_below: int
    source: str

    def has(self, shape: Shape, device: Device) -> bool:
        """Check whether the product belongs to the class."""
        return device.gfx == self.gfx and self.m[0] <= shape.m <= self.m[1] and shape.n < self.n_below


#: Not measured. A first fit would cover 64 <= M <= 1024 and N < 32768.
FITTED: tuple[Fitted, ...] = ()
#: Layout and tile of a kernel that AITER's launcher chooses only for whole tiles of N.
_WHOLE = ("aiter-f4gemm", 128, 512)


def heuristic_fallback(libtype: str, shape: Shape, device: Device, kernels: Kernels) -> Solution | None:
    """Return the first guess for a shuffled weight or a fitted class, else None.

    torch would reorder a shuffled weight in each call.
    """
    if shape.layout == "row" and not any(fitted.has(shape, device) for fitted in FITTED):
        return None
    chosen = guess(shape, device, kernels)
    return solution_of(libtype, *chosen) if chosen else None


def guess(shape: Shape, device: Device, kernels: Kernels) -> Candidate | None:
    """Return the best kernel by `rank` with the splits of AITER's launcher, or None.

    Only AITER's kernels are candidates, because they run in production. The code object is checked.
    """
    if unsupported(shape, device):
        return None
    fitting = []
    for pack_kernel in kernels.values():
        if pack_kernel.of_aiter and shape.op in pack_kernel.abi.ops and not _ragged(pack_kernel.kernel, shape):
            splits = auto_splits(pack_kernel.kernel, shape, device)
            if not unfit(pack_kernel, splits, shape):
                fitting.append((rank(pack_kernel.kernel, splits, shape, device), pack_kernel, splits))
    for _, pack_kernel, splits in sorted(fitting, key=lambda ranked: ranked[0]):
        if not pack_kernel.unfit():
            return pack_kernel.kernel, splits
    return None


def _ragged(kernel: KernelConfig, shape: Shape) -> bool:
    """Check whether the kernel would have a tail in N that AITER's launcher avoids."""
    return (kernel.abi, kernel.tile_m, kernel.tile_n) == _WHOLE and shape.n % kernel.tile_n != 0
