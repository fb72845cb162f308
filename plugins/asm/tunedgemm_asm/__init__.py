"""Backend ``asm``: GEMM kernels for AMD GPUs as code objects (AITER's own, other packs, those of a generator), and for
Hopper as generated PTX. Importing it loads neither torch nor a driver nor a pack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import attrs
from tunedgemm.plugin import Device, Driver, DriverInterface, Launcher, Shape, Solution, Unsupported, hookimpl, loaded_driver

from tunedgemm_asm import abi, heuristic, launch, limits, space
from tunedgemm_asm.ptx import heuristic as ptx_heuristic
from tunedgemm_asm.ptx import launch as ptx_launch
from tunedgemm_asm.ptx import limits as ptx_limits
from tunedgemm_asm.ptx import names as ptx_names
from tunedgemm_asm.ptx import space as ptx_space

if TYPE_CHECKING:
    from tunedgemm_asm import packs


def _catalog(gfx: str) -> packs.Catalog:
    from tunedgemm_asm import packs

    return packs.catalog_of(gfx)


@attrs.frozen(eq=False)
class Asm:
    """The kernels of the packs found as a backend.

    Attributes:
        libtype: what it is called.
        catalog: gives the kernels for an architecture.
        driver: gives the library; called when something is loaded.
        host: what to take a CPU for, where that library emulates a device in host memory.
    """

    libtype: str = "asm"
    catalog: Callable[[str], packs.Catalog] = _catalog
    driver: Callable[[DriverInterface], Driver] = loaded_driver
    host: Device | None = None

    CONTRACT = 1
    OPS = tuple(dict.fromkeys((*limits.OPS, *ptx_limits.OPS)))

    def library_version(self, device: Device) -> str:
        """The digest of all code objects for the device: a kernel's name says nothing of the code behind it."""
        gfx = self._seen(device).gfx
        return self.catalog(gfx).version if gfx in abi.FP8 else ""

    def details(self, device: Device) -> Iterable[str]:
        """Every pack for the device with the hash of what it may execute, and what was refused; on Hopper the assembler."""
        if self._seen(device).gfx == ptx_limits.GFX:
            return ptx_launch.details()
        from tunedgemm_asm import packs

        return packs.lines(self.catalog(self._seen(device).gfx))

    def lacks(self, solution: Solution, device: Device) -> str:
        """Why no pack for the device has the solution's kernel, or the generator of PTX does not know the name."""
        if device.gfx == ptx_limits.GFX:
            return ptx_names.unknown(solution.kernel_name)
        return self.catalog(self._seen(device).gfx).missing(solution.kernel_name)

    @hookimpl
    def supports(self, shape: Shape, device: Device) -> bool | Unsupported:
        """Whether the architecture's static limits allow the shape, and a pack has kernels for it."""
        if (seen := self._seen(device)).gfx == ptx_limits.GFX:
            return self._able(shape, seen)
        return limits.supports(shape, seen, self._kernels(seen))

    @hookimpl
    def enumerate_solutions(self, shape: Shape, device: Device) -> Iterable[Solution]:
        """Every kernel that takes the shape, with every split worth timing, best guesses first."""
        if (seen := self._seen(device)).gfx == ptx_limits.GFX:
            return ptx_space.enumerate_solutions(self.libtype, shape, seen)
        return space.enumerate_solutions(self.libtype, shape, seen, self._kernels(seen))

    @hookimpl
    def refine(self, solution: Solution, shape: Shape, device: Device) -> Iterable[Solution]:
        """The neighbours of a generated kernel for Hopper; packs have none."""
        seen = self._seen(device)
        return ptx_space.refine(self.libtype, solution, shape, seen) if seen.gfx == ptx_limits.GFX else ()

    @hookimpl
    def prepare(self, solution: Solution, shape: Shape, device: Device) -> None:
        """Assemble a kernel for Hopper into the artifact cache; code objects are assembled already."""
        if (seen := self._seen(device)).gfx == ptx_limits.GFX:
            ptx_launch.prepare(solution, shape, seen)

    @hookimpl
    def heuristic_fallback(self, shape: Shape, device: Device) -> Solution | None:
        """The solution of an untuned call, if any."""
        if (seen := self._seen(device)).gfx == ptx_limits.GFX:
            return ptx_heuristic.heuristic_fallback(self.libtype, shape, seen)
        return heuristic.heuristic_fallback(self.libtype, shape, seen, self._kernels(seen))

    @hookimpl
    def bind(self, solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
        """Check and load the code, and fix everything that a call of exactly this shape needs."""
        seen = self._seen(device)
        if not (able := self._able(shape, seen)):
            return Unsupported(str(able))
        if not self._present(device):
            return Unsupported(f"{device} is described, not present")
        if seen.gfx == ptx_limits.GFX:
            return ptx_launch.bind(self.driver, solution, shape, seen, device.torch_device)
        return launch.bind(self.driver, self.catalog(seen.gfx), solution, shape, seen, device.torch_device)

    def _able(self, shape: Shape, device: Device) -> bool | Unsupported:
        """Whether there may be a kernel on the device, whatever packs there are."""
        if device.gfx == ptx_limits.GFX:
            return ptx_limits.supports(shape, device)
        reason = limits.unsupported_device(shape, device)
        return Unsupported(reason) if reason else True

    def _kernels(self, device: Device) -> limits.Kernels:
        """The kernels for the device; for one that has none no pack is looked for."""
        return self.catalog(device.gfx).kernels if device.gfx in abi.FP8 else {}

    def _present(self, device: Device) -> bool:
        return device.index >= 0 or (self.host is not None and device.kind == "cpu")

    def _seen(self, device: Device) -> Device:
        """The device whose limits count."""
        return attrs.evolve(self.host, index=device.index) if self.host is not None and device.kind == "cpu" else device


asm = Asm()
