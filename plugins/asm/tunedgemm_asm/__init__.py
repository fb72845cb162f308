"""Register the backend ``asm``: GEMM kernels as AMD code objects and as PTX generated for Hopper.

The code objects are AITER's, those of other packs, and those of this plugin's generator.
Importing this package loads neither torch nor a driver nor a pack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import attrs
from tunedgemm.plugin import Backend, Device, Launcher, Shape, Solution, Unsupported, hookimpl
from tunedgemm.tools.launching import Driver, DriverInterface, loaded_driver

from tunedgemm_asm import abi, heuristic, launch, limits, names, space
from tunedgemm_asm.ptx import heuristic as ptx_heuristic
from tunedgemm_asm.ptx import invariant as ptx_invariant
from tunedgemm_asm.ptx import launch as ptx_launch
from tunedgemm_asm.ptx import limits as ptx_limits
from tunedgemm_asm.ptx import space as ptx_space

if TYPE_CHECKING:
    from tunedgemm_asm import packs


def _catalog(gfx: str) -> packs.Catalog:
    from tunedgemm_asm import packs

    return packs.catalog_of(gfx)


@attrs.frozen(eq=False)
class Asm:
    """Hooks over the kernels of all installed packs and the generator of PTX.

    Attributes:
        libtype: libtype of its solutions.
        catalog: returns the kernels for an architecture.
        driver: returns the driver library; called when the first kernel is loaded.
    """

    libtype: str = "asm"
    catalog: Callable[[str], packs.Catalog] = _catalog
    driver: Callable[[DriverInterface], Driver] = loaded_driver

    @hookimpl
    def library_version(self, device: Device) -> str:
        """Return a digest of all code objects for the device, since a kernel's name does not
        identify its code.
        """
        return self.catalog(device.gfx).version if device.gfx in abi.FP8 else ""

    @hookimpl
    def details(self, device: Device) -> Iterable[str]:
        """Yield a line for each pack with its hash and for each refusal; on Hopper, name the
        assembler.
        """
        if device.gfx == ptx_limits.GFX:
            return ptx_launch.details()
        from tunedgemm_asm import packs

        return packs.lines(self.catalog(device.gfx))

    @hookimpl
    def lacks(self, solution: Solution, shape: Shape, device: Device) -> str:
        """Return why the solution's kernel is missing; one that does not serve the shape is a PluginError."""
        if device.gfx == ptx_limits.GFX:
            ptx_space.resolve(solution, shape)
            return ""
        catalog = self.catalog(device.gfx)
        return catalog.missing(names.resolve(solution, shape, device, catalog)[0].name)

    @hookimpl
    def supports(self, shape: Shape, device: Device) -> Unsupported | None:
        """Check the architecture's static limits, and that a pack has a kernel for the shape."""
        if device.gfx == ptx_limits.GFX:
            reason = ptx_limits.unsupported(shape, device)
        else:
            reason = limits.unsupported(shape, device) or limits.unserved(shape, device, self._kernels(device))
        return Unsupported(reason) if reason else None

    @hookimpl
    def enumerate_solutions(self, shape: Shape, device: Device) -> Iterable[Solution]:
        """Yield every kernel that takes the shape, with every number of splits worth timing, best
        guess first.
        """
        if device.gfx == ptx_limits.GFX:
            return ptx_space.enumerate_solutions(self.libtype, shape, device)
        return space.enumerate_solutions(self.libtype, shape, device, self._kernels(device))

    @hookimpl
    def refine(self, solution: Solution, shape: Shape, device: Device) -> Iterable[Solution]:
        """Yield the neighbours of a generated Hopper kernel; kernels of packs have none."""
        return ptx_space.refine(self.libtype, solution, shape, device) if device.gfx == ptx_limits.GFX else ()

    @hookimpl
    def prepare(self, solution: Solution, shape: Shape, device: Device) -> None:
        """Assemble a Hopper kernel into the artifact cache; code objects need no preparation."""
        if device.gfx == ptx_limits.GFX:
            ptx_launch.prepare(solution, shape, device)

    @hookimpl
    def heuristic_fallback(self, shape: Shape, device: Device) -> Solution | None:
        """Return the solution of an untuned call, or None."""
        if device.gfx == ptx_limits.GFX:
            return ptx_heuristic.heuristic_fallback(self.libtype, shape, device)
        return heuristic.heuristic_fallback(self.libtype, shape, device, self._kernels(device))

    @hookimpl
    def invariant_fallback(self, shape: Shape, device: Device) -> Solution | None:
        """Return the solution of an untuned call in batch-invariant mode; None but on Hopper."""
        return ptx_invariant.invariant_fallback(self.libtype, shape, device) if device.gfx == ptx_limits.GFX else None

    @hookimpl
    def bind(self, solution: Solution, shape: Shape, device: Device) -> Launcher:
        """Load the checked code and return a launcher for exactly this shape."""
        if device.gfx == ptx_limits.GFX:
            return ptx_launch.bind(self.driver, solution, shape, device)
        return launch.bind(self.driver, self.catalog(device.gfx), solution, shape, device)

    def _kernels(self, device: Device) -> limits.Kernels:
        """Return the kernels for the device; look for packs only on architectures that have some."""
        return self.catalog(device.gfx).kernels if device.gfx in abi.FP8 else {}


asm = Backend(
    "asm",
    Asm(),
    contract=1,
    ops=tuple(dict.fromkeys((*limits.OPS, *ptx_limits.OPS))),
    platforms=(*ptx_limits.PLATFORMS, *limits.PLATFORMS),
    scale_orders=("m_major", "m_major_padded", "aiter32x8"),
    variables=("AITER_ASM_DIR", "TUNEDGEMM_ASM_CLANG", "TUNEDGEMM_ASM_PACKS"),
)
