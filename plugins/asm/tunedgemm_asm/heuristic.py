"""The answer to an untuned call."""

from __future__ import annotations

import attrs
from tunedgemm.plugin import Device, Shape, Solution

from tunedgemm_asm.limits import RULES, Kernels, refused, supports
from tunedgemm_asm.solutions import Chosen, auto_splits, rank, solution_of


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
#: Kernels that answer untuned calls: AITER's, which run in production. Those of the generator never ran on hardware.
_ANSWERING = tuple(name for name in RULES if name.startswith("aiter-"))


def heuristic_fallback(libtype: str, shape: Shape, device: Device, kernels: Kernels) -> Solution | None:
    """The first guess for a shuffled weight, which torch would have to put in order in each call, and in a fitted class; else None."""
    if shape.layout == "row" and not any(fitted.has(shape, device) for fitted in FITTED):
        return None
    chosen = guess(shape, device, kernels)
    return solution_of(libtype, *chosen) if chosen else None


def guess(shape: Shape, device: Device, kernels: Kernels) -> Chosen | None:
    """The best kernel by `rank`, each with the parts of K that AITER's launcher gives it; None where none fits."""
    if not supports(shape, device, kernels):
        return None
    fitting = []
    for loaded in kernels.values():
        if loaded.abi.name in _ANSWERING and shape.op in loaded.abi.ops:
            splits = auto_splits(loaded.kernel, shape, device)
            if not refused(loaded, splits, shape):
                fitting.append((loaded.kernel, splits))
    return min(fitting, key=lambda chosen: rank(chosen[0], chosen[1], shape, device), default=None)
