"""Register the backend ``skinny``: GEMM kernels for few rows, compiled at run time.

Importing this package loads neither torch nor a compiler nor a driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs
from tunedgemm.plugin import Device, Launcher, PluginError, Shape, Solution, Unsupported, hookimpl
from tunedgemm.tools import Driver, DriverInterface, loaded_driver

from tunedgemm_skinny import heuristic, launch, limits, rtc, space


@attrs.frozen(eq=False)
class Skinny:
    """Hooks of the backend.

    Attributes:
        libtype: name of the backend in tables.
        compiler, driver: load the vendor's libraries on the first compile and the first launch.
        host: device that a CPU emulates, if any; both libraries then work in host memory.
    """

    libtype: str = "skinny"
    compiler: Callable[[rtc.Interface], rtc.Compiler] = rtc.loaded
    driver: Callable[[DriverInterface], Driver] = loaded_driver
    host: Device | None = None

    CONTRACT = 1
    OPS = tuple(limits.OPS)
    PLATFORMS = limits.PLATFORMS
    SCALE_ORDERS = ("m_major", "m_major_padded")

    def library_version(self, device: Device) -> str:  # noqa: ARG002
        """Return an empty text: kernel names carry the revision of their source."""
        return ""

    def details(self, device: Device) -> list[str]:
        """Return a line for ``tunedgemm plugins -v``: the run-time compiler, or why there is none."""
        interface = rtc.INTERFACES.get(device.limiting(self.host).kind)
        try:
            compiler = self.compiler(interface) if interface else None
        except PluginError as error:
            return [str(error)]
        return [f"{compiler.version}: {compiler.path}"] if compiler else []

    def lacks(self, solution: Solution, shape: Shape, device: Device) -> str:
        """Return why the solution does not serve the shape, or an empty text."""
        try:
            launch.resolve(solution, shape, device.limiting(self.host))
        except PluginError as error:
            return str(error)
        return ""

    @hookimpl
    def supports(self, shape: Shape, device: Device) -> bool | Unsupported:
        """Check the shape against the architecture's static limits."""
        return limits.supports(shape, device.limiting(self.host))

    @hookimpl
    def enumerate_solutions(self, shape: Shape, device: Device) -> Iterable[Solution]:
        """List the kernels worth timing for the shape, lowest predicted cost first."""
        return space.enumerate_solutions(self.libtype, shape, device.limiting(self.host))

    @hookimpl
    def heuristic_fallback(self, shape: Shape, device: Device) -> Solution | None:
        """Return the solution of an untuned call, or None."""
        return heuristic.heuristic_fallback(self.libtype, shape, device.limiting(self.host))

    @hookimpl
    def prepare(self, solution: Solution, shape: Shape, device: Device) -> None:
        """Compile into the artifact cache, without a device."""
        launch.prepare(self.compiler, solution, shape, device.limiting(self.host))

    @hookimpl
    def bind(self, solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
        """Compile and load the kernel, and fix all launch arguments but the addresses."""
        if not (answer := self.supports(shape, device)):
            return answer  # type: ignore[return-value]
        if not device.is_present(self.host):
            return Unsupported(f"device: not present (got {device})")
        return launch.bind(self.compiler, self.driver, solution, shape, device.limiting(self.host), device.torch_device)

    @hookimpl
    def refine(self, solution: Solution, shape: Shape, device: Device) -> Iterable[Solution]:
        """List the solution's neighbours, which differ in one parameter."""
        return space.refine(solution, shape, device.limiting(self.host))


skinny = Skinny()
