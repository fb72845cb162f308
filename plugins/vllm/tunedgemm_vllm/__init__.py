"""Register the backend ``vllm``: the compiled products of an installed vLLM.

Importing this package loads neither torch nor vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs
from tunedgemm.plugin import Device, Launcher, PluginError, Shape, Solution, Unsupported, hookimpl

from tunedgemm_vllm import launch, library, limits


@attrs.frozen(eq=False)
class Vllm:
    """Hooks of the backend.

    Attributes:
        libtype: name of the backend in tables.
        vendor: names of the package whose library is loaded at the first question about a present
            device.
        host: device that a CPU emulates, if any.
    """

    libtype: str = "vllm"
    vendor: library.Vendor = library.VLLM
    host: Device | None = None

    CONTRACT = 1
    OPS = tuple(limits.OPS)
    PLATFORMS = limits.PLATFORMS
    SCALE_ORDERS = limits.SCALE_ORDERS

    def library_version(self, device: Device) -> str:
        """Return ``vllm 0.25.1``, or an empty text for absent devices."""
        return library.describe(self.vendor.package) if device.is_present(self.host) else ""

    def details(self, device: Device) -> Iterator[str]:  # noqa: ARG002
        """Yield the library's file, which this does not load."""
        if file := library.file_of(self.vendor.package):
            yield f"{library.version_of(self.vendor.package) or 'unknown version'}: {file}"
        else:
            yield "no library found"

    def lacks(self, solution: Solution, shape: Shape, device: Device) -> str:
        """Return why the solution does not serve the shape, or an empty text."""
        answer = self._bound(solution, shape, device) if device.is_present(self.host) else self._known(solution, shape, device)
        return "" if answer else str(answer)

    @hookimpl
    def supports(self, shape: Shape, device: Device) -> bool | Unsupported:
        """Check the static limits, then for a present device whether the library loads."""
        release = library.release_of(self.vendor.package)
        reason = limits.unsupported(shape, device.limiting(self.host), release)
        reason = reason or (library.fault(self.vendor) if device.is_present(self.host) else "")
        return Unsupported(reason) if reason else True

    @hookimpl
    def enumerate_solutions(self, shape: Shape) -> Iterable[Solution]:
        """List the one solution: the operator chooses among its kernels itself."""
        return (Solution(self.libtype, launch.kernel_of(shape)),)

    @hookimpl
    def bind(self, solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
        """Load the library, and return a launcher for exactly this shape."""
        if not device.is_present(self.host):
            return Unsupported(f"device: not present (got {device})")
        return self._bound(solution, shape, device)

    def _known(self, solution: Solution, shape: Shape, device: Device) -> bool | Unsupported:
        if not (answer := self.supports(shape, device)):
            return answer  # type: ignore[return-value]
        if solution.kernel_name != (name := launch.kernel_of(shape)) or solution.split_k:
            return Unsupported(f"vllm: kernel must be {name} without splitK (got {solution.kernel_name!r}, {solution.split_k})")
        return True

    def _bound(self, solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
        if not (answer := self._known(solution, shape, device)):
            return answer  # type: ignore[return-value]
        try:
            return launch.bind(self.vendor, shape, device.limiting(self.host))
        except PluginError as error:
            return Unsupported(str(error))


vllm = Vllm()
