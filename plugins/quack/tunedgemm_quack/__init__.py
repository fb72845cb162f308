"""Register the backend ``quack``: QuACK's products for Hopper in CuTe DSL.

Importing this package loads neither torch nor QuACK.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs
from tunedgemm.plugin import Backend, Device, Launcher, Platform, Shape, Solution, Unsupported, hookimpl
from tunedgemm.tools.launching import on_device

from tunedgemm_quack import library, limits, space


@attrs.frozen(eq=False)
class Quack:
    """Hooks of the backend.

    Attributes:
        libtype: name of the backend in tables.
        installation: returns what is installed, without an import.
        import_fault: returns why it does not import; asked for present devices only.
        load: imports QuACK; called to bind or compile only.
    """

    libtype: str = "quack"
    installation: Callable[[], library.Installation] = library.installation
    import_fault: Callable[[], str] = library.import_fault
    load: Callable[[], library.Library] = library.load

    @hookimpl
    def library_version(self) -> str:
        """Return ``quack 0.6.5 cutlass-dsl 4.8.1``; "" where one is absent."""
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
        from tunedgemm_quack import launch

        launch.resolve(solution, shape)
        return launch.uncompiled(solution, shape, self.installation().version) if device.is_present else ""

    @hookimpl
    def supports(self, shape: Shape, device: Device) -> Unsupported | None:
        """Check the shape against the kernels' static limits, and that QuACK is installed and whole."""
        reason = limits.unsupported(shape, device) or self.installation().fault
        reason = reason or (self.import_fault() if device.is_present else "")
        return Unsupported(reason) if reason else None

    @hookimpl
    def enumerate_solutions(self, shape: Shape, device: Device) -> Iterable[Solution]:
        """List the configurations worth timing, lowest predicted cost first."""
        return space.enumerate_solutions(self.libtype, shape, device)

    @hookimpl
    def prepare(self, solution: Solution, shape: Shape) -> None:
        """Compile into the cache, without a device."""
        from tunedgemm_quack import launch

        launch.prepare(self.load, solution, shape, self.installation().version)

    @hookimpl
    def bind(self, solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
        """Load the kernel that was prepared, and return its launcher."""
        from tunedgemm_quack import launch

        if reason := self.lacks(solution, shape, device):
            return Unsupported(reason)
        bound = launch.bind(self.load, solution, shape, device.torch_device)
        return attrs.evolve(bound, call=on_device(bound.call, device.index))


quack = Backend(
    "quack",
    Quack(),
    contract=1,
    ops=limits.OPS,
    platforms=(Platform((limits.GFX,), ran=("H100",), needs=("quack-kernels 0.6.2 or later", "nvidia-cutlass-dsl, [cu13] for CUDA 13")),),
    variables=("TUNEDGEMM_QUACK_COMPILE",),
)
