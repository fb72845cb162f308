"""The answer to an untuned call."""

from __future__ import annotations

import attrs
from tunedgemm.plugin import Device, Shape, Solution

from tunedgemm_asm.cost import rank
from tunedgemm_asm.limits import Kernels, unsupported, unsupported_device
from tunedgemm_asm.manifest import KernelConfig
from tunedgemm_asm.names import Candidate, auto_splits, solution_of


@attrs.frozen
class Fitted:
    """Products of plain weights of which it was measured that the first guess beats torch.

    Attributes:
        gfx: the architecture.
        m: least and most rows of x.
        n_below: what N lies below.
        source: what was measured, where and when.
    """

    gfx: str
    m: tuple[int, int]
    n_below: int
    source: str

    def has(self, shape: Shape, device: Device) -> bool:
        """Whether the product is one of them."""
        return device.gfx == self.gfx and self.m[0] <= shape.m <= self.m[1] and shape.n < self.n_below


#: None was measured. A fit would begin with 64 <= M <= 1024 and N < 32768.
FITTED: tuple[Fitted, ...] = ()
#: Layout and tile of the kernel that AITER's launcher gives whole tiles of N alone where it chooses; rows and the tuner name it for others.
_WHOLE = ("aiter-f4gemm", 128, 512)


def heuristic_fallback(libtype: str, shape: Shape, device: Device, kernels: Kernels) -> Solution | None:
    """The first guess for a shuffled weight, which torch would have to put in order in each call, and in a fitted class; else None."""
    if shape.layout == "row" and not any(fitted.has(shape, device) for fitted in FITTED):
        return None
    chosen = guess(shape, device, kernels)
    return solution_of(libtype, *chosen) if chosen else None


def guess(shape: Shape, device: Device, kernels: Kernels) -> Candidate | None:
    """The best kernel by `rank`, each with the parts of K that AITER's launcher gives it; None where none fits.

    It is one of AITER's, which run in production: kernels of other packs are chosen by tuning alone. Its code object was read and may run.
    """
    if unsupported_device(shape, device):
        return None
    fitting = []
    for pack_kernel in kernels.values():
        if pack_kernel.of_aiter and shape.op in pack_kernel.abi.ops and not _ragged(pack_kernel.kernel, shape):
            splits = auto_splits(pack_kernel.kernel, shape, device)
            if not unsupported(pack_kernel, splits, shape):
                fitting.append((rank(pack_kernel.kernel, splits, shape, device), pack_kernel, splits))
    for _, pack_kernel, splits in sorted(fitting, key=lambda each: each[0]):
        if not pack_kernel.unfit():
            return pack_kernel.kernel, splits
    return None


def _ragged(kernel: KernelConfig, shape: Shape) -> bool:
    """Whether the kernel would have a tail in N that AITER's launcher does not trust it with."""
    return (kernel.abi, kernel.tile_m, kernel.tile_n) == _WHOLE and shape.n % kernel.tile_n != 0
