"""Register the backend ``asm``: GEMM kernels as AMD code objects and as PTX generated for Hopper.

The code objects are AITER's, those of other packs, and those of this plugin's generator.
Importing this package loads neither torch nor a driver nor a pack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import attrs
from tunedgemm.plugin import Device, Launcher, PluginError, Shape, Solution, Unsupported, hookimpl
from tunedgemm.tools import Driver, DriverInterface, loaded_driver

from tunedgemm_asm import abi, heuristic, launch, limits, names, space
from tunedgemm_asm.ptx import heuristic as ptx_heuristic
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
    """Backend over the kernels of all installed packs and the generator of PTX.

    Attributes:
        libtype: libtype of its solutions.
        catalog: returns the kernels for an architecture.
        driver: returns the driver library; called when the first kernel is loaded.
        host: device that a CPU emulates, if any; *driver* then returns a library for host memory.
    """

    libtype: str = "asm"
    catalog: Callable[[str], packs.Catalog] = _catalog
    driver: Callable[[DriverInterface], Driver] = loaded_driver
    host: Device | None = None

    CONTRACT = 1
    OPS = tuple(dict.fromkeys((*limits.OPS, *ptx_limits.OPS)))
    PLATFORMS = (*ptx_limits.PLATFORMS, *limits.PLATFORMS)
    SCALE_ORDERS = ("m_major", "m_major_padded", "aiter32x8")
    VARIABLES = ("AITER_ASM_DIR", "TUNEDGEMM_ASM_CLANG", "TUNEDGEMM_ASM_PACKS")

    def library_version(self, device: Device) -> str:
        """Return a digest of all code objects for the device, since a kernel's name does not
        identify its code.
        """
        gfx = device.limiting(self.host).gfx
        return self.catalog(gfx).version if gfx in abi.FP8 else ""

    def details(self, device: Device) -> Iterable[str]:
        """Yield a line for each pack with its hash and for each refusal; on Hopper, name the
        assembler.
        """
        if device.limiting(self.host).gfx == ptx_limits.GFX:
            return ptx_launch.details()
        from tunedgemm_asm import packs

        return packs.lines(self.catalog(device.limiting(self.host).gfx))

    def lacks(self, solution: Solution, shape: Shape, device: Device) -> str:
        """Return why the solution's kernel is missing or does not serve the shape, or an empty text."""
        limiting = device.limiting(self.host)
        try:
            if limiting.gfx == ptx_limits.GFX:
                ptx_space.resolve(solution, shape)
                return ""
            catalog = self.catalog(limiting.gfx)
            return catalog.missing(names.resolve(solution, shape, limiting, catalog)[0].name)
        except PluginError as error:
            return str(error)

    @hookimpl
    def supports(self, shape: Shape, device: Device) -> bool | Unsupported:
        """Check the architecture's static limits, and that a pack has a kernel for the shape."""
        if (limiting := device.limiting(self.host)).gfx == ptx_limits.GFX:
            return self._supported(shape, limiting)
        return limits.supports(shape, limiting, self._kernels(limiting))

    @hookimpl
    def enumerate_solutions(self, shape: Shape, device: Device) -> Iterable[Solution]:
        """Yield every kernel that takes the shape, with every number of splits worth timing, best
        guess first.
        """
        if (limiting := device.limiting(self.host)).gfx == ptx_limits.GFX:
            return ptx_space.enumerate_solutions(self.libtype, shape, limiting)
        return space.enumerate_solutions(self.libtype, shape, limiting, self._kernels(limiting))

    @hookimpl
    def refine(self, solution: Solution, shape: Shape, device: Device) -> Iterable[Solution]:
        """Yield the neighbours of a generated Hopper kernel; kernels of packs have none."""
        limiting = device.limiting(self.host)
        return ptx_space.refine(self.libtype, solution, shape, limiting) if limiting.gfx == ptx_limits.GFX else ()

    @hookimpl
    def prepare(self, solution: Solution, shape: Shape, device: Device) -> None:
        """Assemble a Hopper kernel into the artifact cache; code objects need no preparation."""
        if (limiting := device.limiting(self.host)).gfx == ptx_limits.GFX:
            ptx_launch.prepare(solution, shape, limiting)

    @hookimpl
    def heuristic_fallback(self, shape: Shape, device: Device) -> Solution | None:
        """Return the solution of an untuned call, or None."""
        if (limiting := device.limiting(self.host)).gfx == ptx_limits.GFX:
            return ptx_heuristic.heuristic_fallback(self.libtype, shape, limiting)
        return heuristic.heuristic_fallback(self.libtype, shape, limiting, self._kernels(limiting))

    @hookimpl
    def bind(self, solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
        """Load the checked code and return a launcher for exactly this shape."""
        limiting = device.limiting(self.host)
        if not (supported := self._supported(shape, limiting)):
            return Unsupported(str(supported))
        if not device.is_present(self.host):
            return Unsupported(f"device: not present (got {device})")
        if limiting.gfx == ptx_limits.GFX:
            return ptx_launch.bind(self.driver, solution, shape, limiting, device.torch_device)
        return launch.bind(self.driver, self.catalog(limiting.gfx), solution, shape, limiting, device.torch_device)

    def _supported(self, shape: Shape, device: Device) -> bool | Unsupported:
        """Check whether any kernel could serve the shape on the device, whatever packs are
        installed.
        """
        if device.gfx == ptx_limits.GFX:
            return ptx_limits.supports(shape, device)
        reason = limits.unsupported(shape, device)
        return Unsupported(reason) if reason else True

    def _kernels(self, device: Device) -> limits.Kernels:
        """Return the kernels for the device; look for packs only on architectures that have some."""
        return self.catalog(device.gfx).kernels if device.gfx in abi.FP8 else {}


asm = Asm()
