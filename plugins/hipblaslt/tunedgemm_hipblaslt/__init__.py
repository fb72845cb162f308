"""Register the backends ``hipblaslt`` and ``cublaslt``: the vendors' Lt libraries.

Importing this package loads neither torch nor a library. It also exports gradlib's
`hipb_create_extension`, `hipb_destroy_extension`, `hipb_findallsols` and `hipb_mm`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import attrs
from tunedgemm.plugin import Device, Launcher, Platform, PluginError, Shape, Solution, Unsupported, hookimpl

from tunedgemm_hipblaslt import heuristic, limits
from tunedgemm_hipblaslt.abi import CUBLASLT, HIPBLASLT, Abi
from tunedgemm_hipblaslt.library import Library, library_build, load_library
from tunedgemm_hipblaslt.names import FIRST, name_of

_GRADLIB = ("hipb_create_extension", "hipb_destroy_extension", "hipb_findallsols", "hipb_mm")


@attrs.frozen(eq=False)
class LtBackend:
    """Backend over one of the libraries.

    Attributes:
        abi: the library's names and numbers.
        load: returns the library; called only for a present device.
        host: device that a CPU emulates, if any; *load* then returns a library for host memory.
    """

    abi: Abi
    load: Callable[[Abi], Library] = load_library
    host: Device | None = None

    CONTRACT = 1
    SCALE_ORDERS = limits.SCALE_ORDERS

    @property
    def OPS(self) -> tuple[str, ...]:
        """Ops that this library covers."""
        return limits.supported_ops(self.abi)

    @property
    def PLATFORMS(self) -> tuple[Platform, ...]:
        """Architectures that this library serves."""
        return limits.platforms(self.abi)

    def library_version(self, device: Device) -> str:
        """Return ``cublaslt 130100`` or ``hipblaslt 100200 a1b2c3d4``; "" for absent devices."""
        if not self._is_present(device):
            return ""
        return " ".join(str(part) for part in (self.abi.libtype, *self._build(device)) if part)

    def lacks(self, solution: Solution, shape: Shape, device: Device) -> str:
        """Return why the solution does not serve the shape; for absent devices, a name that no library takes."""
        if self._is_present(device):
            answer = self.bind(solution, shape, device)
            return str(answer) if isinstance(answer, Unsupported) else ""
        try:
            name_of(self.abi, solution)
        except PluginError as error:
            return str(error)
        return ""

    @hookimpl
    def supports(self, shape: Shape, device: Device) -> bool | Unsupported:
        """Check the shape against the library's static limits."""
        reason = limits.unsupported(shape, device.limiting(self.host), self.abi)
        return Unsupported(reason) if reason else True

    @hookimpl
    def enumerate_solutions(self, shape: Shape, device: Device) -> Iterable[Solution]:
        """List the library's algorithms, best first; for absent devices its first answer."""
        if not self._is_present(device):
            return (Solution(self.abi.libtype, FIRST),)
        from tunedgemm_hipblaslt import space

        return space.enumerate_solutions(self.load(self.abi), shape, device.limiting(self.host))

    @hookimpl
    def heuristic_fallback(self, shape: Shape, device: Device) -> Solution | None:
        """Return the solution of an untuned call, if any."""
        read_build = functools.partial(self._build, device) if self._is_present(device) else None
        refusal = functools.partial(self.lacks, shape=shape, device=device)
        return heuristic.heuristic_fallback(shape, device.limiting(self.host), self.abi, read_build, refusal)

    @hookimpl
    def bind(self, solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
        """Return a launcher with descriptors and algorithm for exactly this shape."""
        if not (answer := self.supports(shape, device)):
            return answer  # type: ignore[return-value]
        if not self._is_present(device):
            return Unsupported(f"device: not present (got {device})")
        from tunedgemm_hipblaslt import launch

        return launch.bind(self.load(self.abi), solution, shape, device)

    @hookimpl
    def refine(self, solution: Solution, shape: Shape, device: Device) -> Iterable[Solution]:
        """List configurations that differ in one attribute; none for hipBLASLt."""
        from tunedgemm_hipblaslt import space

        return space.refine(self.load(self.abi), solution, shape, device.limiting(self.host)) if self._is_present(device) else ()

    def _build(self, device: Device) -> tuple[int, str]:
        return library_build(self.load(self.abi), device.index)

    def _is_present(self, device: Device) -> bool:
        return (device.index >= 0 and device.kind == self.abi.kind) or (self.host is not None and device.kind == "cpu")


cublaslt = LtBackend(CUBLASLT)
hipblaslt = LtBackend(HIPBLASLT)


def __getattr__(name: str) -> Any:
    if name in _GRADLIB:
        from tunedgemm_hipblaslt import gradlib

        return getattr(gradlib, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
