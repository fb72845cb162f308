"""Register the backend ``vllm``: the compiled products of an installed vLLM.

Importing this package loads neither torch nor vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs
from tunedgemm.plugin import Backend, Device, Launcher, PluginError, Shape, Solution, Unsupported, hookimpl

from tunedgemm_vllm import launch, library, limits


@attrs.frozen(eq=False)
class Vllm:
    """Hooks of the backend.

    Attributes:
        libtype: name of the backend in tables.
        vendor: names of the package whose library is loaded at the first question about a present
            device.
    """

    libtype: str = "vllm"
    vendor: library.Vendor = library.VLLM

    @hookimpl
    def library_version(self, device: Device) -> str:
        """Return ``vllm 0.25.1``, or an empty text for absent devices."""
        return library.describe(self.vendor.package) if device.is_present else ""

    @hookimpl
    def details(self) -> Iterator[str]:
        """Yield the library's file, which this does not load."""
        if file := library.file_of(self.vendor.package):
            yield f"{library.version_of(self.vendor.package) or 'unknown version'}: {file}"
        else:
            yield "no library found"

    @hookimpl
    def lacks(self, solution: Solution, shape: Shape, device: Device) -> str:
        """Return an empty text; a solution that does not serve the shape is a PluginError."""
        if device.is_present:
            self.bind(solution, shape, device)
        else:
            _require_known(solution, shape)
        return ""

    @hookimpl
    def supports(self, shape: Shape, device: Device) -> Unsupported | None:
        """Check the static limits, then for a present device whether the library loads."""
        reason = limits.unsupported(shape, device, library.release_of(self.vendor.package))
        reason = reason or (library.fault(self.vendor) if device.is_present else "")
        return Unsupported(reason) if reason else None

    @hookimpl
    def enumerate_solutions(self, shape: Shape) -> Iterable[Solution]:
        """List the operator, which chooses among its kernels itself, then kernels that a caller may name."""
        return (Solution(self.libtype, name, deterministic=equal) for name, equal in launch.kernels_of(shape).items())

    @hookimpl
    def bind(self, solution: Solution, shape: Shape, device: Device) -> Launcher:
        """Load the library, and return a launcher for exactly this shape."""
        _require_known(solution, shape)
        return launch.bind(self.vendor, solution.kernel_name, shape, device)


def _require_known(solution: Solution, shape: Shape) -> None:
    """Raise PluginError for another solution than those that are listed."""
    if solution.kernel_name not in (names := launch.kernels_of(shape)) or solution.split_k:
        wanted = " or ".join(names)
        raise PluginError(f"vllm: kernel must be {wanted} without splitK (got {solution.kernel_name!r}, {solution.split_k})")


vllm = Backend("vllm", Vllm(), contract=1, ops=tuple(limits.OPS), platforms=limits.PLATFORMS, scale_orders=limits.SCALE_ORDERS)
