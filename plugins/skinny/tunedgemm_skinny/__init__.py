"""Backend ``skinny``: GEMM kernels for few rows, one C++ source for NVIDIA and AMD, compiled at run time. Importing it loads neither
torch nor a compiler nor a driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs
from tunedgemm.plugin import Device, Launcher, Shape, Solution, Unsupported, hookimpl
from tunedgemm.tools import Driver, DriverInterface, loaded_driver

from tunedgemm_skinny import heuristic, launch, limits, rtc, solutions


@attrs.frozen(eq=False)
class Skinny:
    """The kernels as a backend.

    Attributes:
        libtype: what it is called.
        compiler, driver: give the libraries; called when something is compiled or launched.
        host: what to take a CPU for, where these libraries emulate a device in host memory.
    """

    libtype: str = "skinny"
    compiler: Callable[[rtc.Interface], rtc.Compiler] = rtc.loaded
    driver: Callable[[DriverInterface], Driver] = loaded_driver
    host: Device | None = None

    CONTRACT = 1
    OPS = tuple(limits.OPS)

    def library_version(self, device: Device) -> str:  # noqa: ARG002
        """Empty: kernel names carry the revision of their source."""
        return ""

    @hookimpl
    def supports(self, shape: Shape, device: Device) -> bool | Unsupported:
        """Whether the architecture's static limits allow the shape."""
        return limits.supports(shape, self._seen(device))

    @hookimpl
    def enumerate_solutions(self, shape: Shape, device: Device) -> Iterable[Solution]:
        """The kernels worth timing for the shape, best guesses first."""
        return solutions.enumerate_solutions(self.libtype, shape, self._seen(device))

    @hookimpl
    def heuristic_fallback(self, shape: Shape, device: Device) -> Solution | None:
        """The solution of an untuned call, if any."""
        return heuristic.heuristic_fallback(self.libtype, shape, self._seen(device))

    @hookimpl
    def prepare(self, solution: Solution, shape: Shape, device: Device) -> None:
        """Compile into the artifact cache, without a device."""
        launch.prepare(self.compiler, solution, shape, self._seen(device))

    @hookimpl
    def bind(self, solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
        """Compile, load and fix everything that a call of exactly this shape needs."""
        if not (answer := self.supports(shape, device)):
            return answer  # type: ignore[return-value]
        if not self._present(device):
            return Unsupported(f"{device} is described, not present")
        return launch.bind(self.compiler, self.driver, solution, shape, self._seen(device), device.torch_device)

    @hookimpl
    def refine(self, solution: Solution, shape: Shape, device: Device) -> Iterable[Solution]:
        """The solution's neighbours: one parameter changed at a time."""
        return solutions.refine(solution, shape, self._seen(device))

    def _present(self, device: Device) -> bool:
        return device.index >= 0 or (self.host is not None and device.kind == "cpu")

    def _seen(self, device: Device) -> Device:
        """The device whose limits count."""
        return attrs.evolve(self.host, index=device.index) if self.host is not None and device.kind == "cpu" else device


skinny = Skinny()
