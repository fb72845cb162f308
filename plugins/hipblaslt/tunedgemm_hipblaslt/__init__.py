"""Register the backends ``hipblaslt`` and ``cublaslt``: the vendors' Lt libraries.

Importing this package loads neither torch nor a library. It also exports gradlib's
`hipb_create_extension`, `hipb_destroy_extension`, `hipb_findallsols` and `hipb_mm`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import attrs
from tunedgemm.plugin import Backend, Device, Launcher, PluginError, Shape, Solution, Unsupported, hookimpl

from tunedgemm_hipblaslt import heuristic, limits
from tunedgemm_hipblaslt.abi import CUBLASLT, HIPBLASLT, Abi
from tunedgemm_hipblaslt.library import Library, library_build, load_library
from tunedgemm_hipblaslt.names import FIRST, name_of

_GRADLIB = ("hipb_create_extension", "hipb_destroy_extension", "hipb_findallsols", "hipb_mm")


@attrs.frozen(eq=False)
class Lt:
    """Hooks over one of the libraries.

    Attributes:
        abi: the library's names and numbers.
        load: returns the library; called only for a present device.
    """

    abi: Abi
    load: Callable[[Abi], Library] = load_library

    @hookimpl
    def library_version(self, device: Device) -> str:
        """Return ``cublaslt 130100`` or ``hipblaslt 100200 a1b2c3d4``; "" for absent devices."""
        if not device.is_present or device.kind != self.abi.kind:
            return ""
        return " ".join(str(part) for part in (self.abi.libtype, *self._build(device)) if part)

    @hookimpl
    def lacks(self, solution: Solution, shape: Shape, device: Device) -> str:
        """Return why the solution does not serve the shape; a name that no library takes is a PluginError."""
        if device.is_present:
            answer = self.bind(solution, shape, device)
            return str(answer) if isinstance(answer, Unsupported) else ""
        name_of(self.abi, solution)
        return ""

    @hookimpl
    def supports(self, shape: Shape, device: Device) -> Unsupported | None:
        """Check the shape against the library's static limits."""
        reason = limits.unsupported(shape, device, self.abi)
        return Unsupported(reason) if reason else None

    @hookimpl
    def enumerate_solutions(self, shape: Shape, device: Device) -> Iterable[Solution]:
        """List the library's algorithms, best first; for absent devices its first answer."""
        if not device.is_present:
            return (Solution(self.abi.libtype, FIRST),)
        from tunedgemm_hipblaslt import space

        return space.enumerate_solutions(self.load(self.abi), shape, device)

    @hookimpl
    def heuristic_fallback(self, shape: Shape, device: Device) -> Solution | None:
        """Return the solution of an untuned call, if any."""
        read_build = functools.partial(self._build, device) if device.is_present else None
        return heuristic.heuristic_fallback(shape, device, self.abi, read_build, functools.partial(self._refusal, shape, device))

    @hookimpl
    def bind(self, solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
        """Return a launcher with descriptors and algorithm for exactly this shape."""
        from tunedgemm_hipblaslt import launch

        return launch.bind(self.load(self.abi), solution, shape, device)

    @hookimpl
    def refine(self, solution: Solution, shape: Shape, device: Device) -> Iterable[Solution]:
        """List configurations that differ in one attribute; none for hipBLASLt."""
        from tunedgemm_hipblaslt import space

        return space.refine(self.load(self.abi), solution, shape, device) if device.is_present else ()

    def _refusal(self, shape: Shape, device: Device, solution: Solution) -> str:
        """Return why the library has no algorithm of a row, or an empty text."""
        try:
            return self.lacks(solution, shape, device)
        except PluginError as error:
            return str(error)

    def _build(self, device: Device) -> tuple[int, str]:
        return library_build(self.load(self.abi), device.index)


def backend_of(abi: Abi, load: Callable[[Abi], Library] = load_library, host: Device | None = None) -> Backend:
    """Return the backend over a library; with a *host*, *load* returns one for host memory."""
    return Backend(
        abi.libtype,
        Lt(abi, load),
        contract=1,
        ops=limits.supported_ops(abi),
        platforms=limits.platforms(abi),
        scale_orders=limits.SCALE_ORDERS,
        host=host,
    )


cublaslt = backend_of(CUBLASLT)
hipblaslt = backend_of(HIPBLASLT)


def __getattr__(name: str) -> Any:
    if name in _GRADLIB:
        from tunedgemm_hipblaslt import gradlib

        return getattr(gradlib, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
