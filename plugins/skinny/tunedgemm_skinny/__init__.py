"""Register the backend ``skinny``: GEMM kernels for few rows, compiled at run time.

Importing this package loads neither torch nor a compiler nor a driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs
from tunedgemm.plugin import Backend, Device, Launcher, PluginError, Shape, Solution, Unsupported, hookimpl
from tunedgemm.tools.launching import Driver, DriverInterface, loaded_driver

from tunedgemm_skinny import heuristic, launch, limits, rtc, space


@attrs.frozen(eq=False)
class Skinny:
    """Hooks of the backend.

    Attributes:
        libtype: name of the backend in tables.
        compiler, driver: load the vendor's libraries on the first compile and the first launch.
    """

    libtype: str = "skinny"
    compiler: Callable[[rtc.Interface], rtc.Compiler] = rtc.loaded
    driver: Callable[[DriverInterface], Driver] = loaded_driver

    @hookimpl
    def details(self, device: Device) -> list[str]:
        """Return a line for ``tunedgemm plugins -v``: the run-time compiler, or why there is none."""
        interface = rtc.INTERFACES.get(device.kind)
        try:
            compiler = self.compiler(interface) if interface else None
        except PluginError as error:
            return [str(error)]
        return [f"{compiler.version}: {compiler.path}"] if compiler else []

    @hookimpl
    def lacks(self, solution: Solution, shape: Shape, device: Device) -> str:
        """Return an empty text; a solution that does not serve the shape is a PluginError."""
        launch.resolve(solution, shape, device)
        return ""

    @hookimpl
    def supports(self, shape: Shape, device: Device) -> Unsupported | None:
        """Check the shape against the architecture's static limits."""
        reason = limits.unsupported(shape, device)
        return Unsupported(reason) if reason else None

    @hookimpl
    def enumerate_solutions(self, shape: Shape, device: Device) -> Iterable[Solution]:
        """List the kernels worth timing for the shape, lowest predicted cost first."""
        return space.enumerate_solutions(self.libtype, shape, device)

    @hookimpl
    def heuristic_fallback(self, shape: Shape, device: Device) -> Solution | None:
        """Return the solution of an untuned call, or None."""
        return heuristic.heuristic_fallback(self.libtype, shape, device)

    @hookimpl
    def prepare(self, solution: Solution, shape: Shape, device: Device) -> None:
        """Compile into the artifact cache, without a device."""
        launch.prepare(self.compiler, solution, shape, device)

    @hookimpl
    def bind(self, solution: Solution, shape: Shape, device: Device) -> Launcher:
        """Compile and load the kernel, and fix all launch arguments but the addresses."""
        return launch.bind(self.compiler, self.driver, solution, shape, device)

    @hookimpl
    def refine(self, solution: Solution, shape: Shape, device: Device) -> Iterable[Solution]:
        """List the solution's neighbours, which differ in one parameter."""
        return space.refine(solution, shape, device)


skinny = Backend(
    "skinny", Skinny(), contract=1, ops=tuple(limits.OPS), platforms=limits.PLATFORMS, scale_orders=("m_major", "m_major_padded")
)
