"""Register the backend ``humming``: Humming's products of 16-bit activations by packed weights.

Importing this package loads neither torch nor Humming.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs
from tunedgemm.plugin import Backend, Device, Launcher, Platform, Shape, Solution, Unsupported, hookimpl

from tunedgemm_humming import library, limits, space


@attrs.frozen(eq=False)
class Humming:
    """Hooks of the backend.

    Attributes:
        libtype: name of the backend in tables.
        installation: returns what is installed, without an import.
        import_fault: returns why it does not load; asked for present devices only.
        load: imports Humming; called to list, compile or bind.
    """

    libtype: str = "humming"
    installation: Callable[[], library.Installation] = library.installation
    import_fault: Callable[[], str] = library.import_fault
    load: Callable[[], library.Library] = library.load

    @hookimpl
    def library_version(self) -> str:
        """Return ``humming 0.1.20``; "" where it is absent."""
        return self.installation().version

    @hookimpl
    def details(self) -> Iterable[str]:
        """Return what is installed, or why it cannot be used."""
        here = self.installation()
        return (here.fault or here.version,)

    @hookimpl
    def lacks(self, solution: Solution, shape: Shape, device: Device) -> str:
        """Return why the solution is not compiled for a present device, or an empty text.

        A solution that does not serve the shape is a PluginError.
        """
        from tunedgemm_humming import launch

        if not solution.kernel_name:
            return "" if device.is_present else space.ABSENT
        launch.resolve(solution)
        return launch.uncompiled(solution, shape, self.installation().version) if device.is_present else ""

    @hookimpl
    def supports(self, shape: Shape, device: Device) -> Unsupported | None:
        """Check the static limits, and that Humming is installed and loads."""
        reason = limits.unsupported(shape, device) or self.installation().fault
        reason = reason or (self.import_fault() if device.is_present else "")
        return Unsupported(reason) if reason else None

    @hookimpl
    def enumerate_solutions(self, shape: Shape, device: Device) -> Iterable[Solution]:
        """List Humming's choice for a present device first, then other configurations of its kernel."""
        return space.enumerate_solutions(self.libtype, self.load, shape, device)

    @hookimpl
    def prepare(self, solution: Solution, shape: Shape) -> None:
        """Compile into Humming's cache, without a device."""
        from tunedgemm_humming import launch

        launch.prepare(self.load, solution, shape, self.installation().version)

    @hookimpl
    def bind(self, solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
        """Load the kernel that was prepared, and return its launcher."""
        from tunedgemm_humming import launch

        if reason := self.lacks(solution, shape, device):
            return Unsupported(reason)
        return launch.bind(self.load, solution, shape, device, self.installation().version)


humming = Backend(
    "humming",
    Humming(),
    contract=1,
    ops=limits.OPS,
    platforms=(Platform((limits.GFX,), needs=("humming-kernels 0.1.20 or later, [cu12] or [cu13] without a CUDA toolkit",)),),
    variables=("TUNEDGEMM_HUMMING_COMPILE",),
)
