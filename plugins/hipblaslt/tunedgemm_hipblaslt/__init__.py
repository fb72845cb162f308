"""Backends ``hipblaslt`` and ``cublaslt``: the vendors' Lt libraries, over one layer. Importing it loads neither library nor torch.

gradlib's functions are here under their names: `hipb_create_extension`, `hipb_destroy_extension`, `hipb_findallsols`, `hipb_mm`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import attrs
from tunedgemm.plugin import Device, Launcher, Shape, Solution, Unsupported, hookimpl

from tunedgemm_hipblaslt import heuristic, limits
from tunedgemm_hipblaslt.abi import CUBLASLT, HIPBLASLT, Abi
from tunedgemm_hipblaslt.library import Library, build, loaded
from tunedgemm_hipblaslt.names import FIRST

_GRADLIB = ("hipb_create_extension", "hipb_destroy_extension", "hipb_findallsols", "hipb_mm")


@attrs.frozen(eq=False)
class Lt:
    """One of the libraries as a backend.

    Attributes:
        abi: which.
        load: gives the library; called when a present device is asked about.
        host: what to take a CPU for, where *load* gives a library that computes in host memory.
    """

    abi: Abi
    load: Callable[[Abi], Library] = loaded
    host: Device | None = None

    CONTRACT = 1

    @property
    def OPS(self) -> tuple[str, ...]:
        """The ops that this library has something of."""
        return limits.ops_of(self.abi)

    def library_version(self, device: Device) -> str:
        """``cublaslt 130100``, or ``hipblaslt 100200 a1b2c3d4``; for absent devices empty."""
        if not self._present(device):
            return ""
        return " ".join(str(part) for part in (self.abi.libtype, *self._versions(device)) if part)

    @hookimpl
    def supports(self, shape: Shape, device: Device) -> bool | Unsupported:
        """Whether the library's static limits allow the shape."""
        return limits.supports(shape, self._seen(device), self.abi)

    @hookimpl
    def enumerate_solutions(self, shape: Shape, device: Device) -> Iterable[Solution]:
        """What the library answers, best guesses first; for absent devices its first answer, unasked."""
        if not self._present(device):
            return (Solution(self.abi.libtype, FIRST),)
        from tunedgemm_hipblaslt import solutions

        return solutions.enumerate_solutions(self.load(self.abi), shape, self._seen(device))

    @hookimpl
    def heuristic_fallback(self, shape: Shape, device: Device) -> Solution | None:
        """The solution of an untuned call, if any."""
        present = functools.partial(self._versions, device) if self._present(device) else None
        return heuristic.heuristic_fallback(shape, self._seen(device), self.abi, present)

    @hookimpl
    def bind(self, solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
        """Descriptors and algorithm for exactly this shape."""
        if not (answer := self.supports(shape, device)):
            return answer  # type: ignore[return-value]
        if not self._present(device):
            return Unsupported(f"{device} is described, not present")
        from tunedgemm_hipblaslt import launch

        return launch.bind(self.load(self.abi), solution, shape, device)

    @hookimpl
    def refine(self, solution: Solution, shape: Shape, device: Device) -> Iterable[Solution]:
        """Configurations one attribute away, where the library has such."""
        from tunedgemm_hipblaslt import solutions

        return solutions.refine(self.load(self.abi), solution, shape, self._seen(device)) if self._present(device) else ()

    def _versions(self, device: Device) -> tuple[int, str]:
        return build(self.load(self.abi), device.index)

    def _present(self, device: Device) -> bool:
        return (device.index >= 0 and device.kind == self.abi.kind) or (self.host is not None and device.kind == "cpu")

    def _seen(self, device: Device) -> Device:
        """The device whose limits count."""
        return attrs.evolve(self.host, index=device.index) if self.host is not None and device.kind == "cpu" else device


cublaslt = Lt(CUBLASLT)
hipblaslt = Lt(HIPBLASLT)


def __getattr__(name: str) -> Any:
    if name in _GRADLIB:
        from tunedgemm_hipblaslt import gradlib

        return getattr(gradlib, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
