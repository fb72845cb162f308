"""The hooks of a backend, and the markers of their specifications and implementations.

An implementation may take any subset of a hook's arguments and may not give them defaults. The
device is the one whose limits apply. `Backend` validates the hooks by pluggy and binds them as
plain functions (hook wrappers do not apply). It asks `supports` first, so that each later hook gets
a supported shape, and `bind` a present device.

In `supports`, `bind` and `lacks` a PluginError is a refusal: its text is the reason.
"""

# Bodies are docstrings only: pluggy reads the signatures.
# mypy: disable-error-code="empty-body"
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pluggy

from tunedgemm.backends.launcher import Launcher
from tunedgemm.device import Device
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported

#: Version of the hooks, of `Backend` and of `tunedgemm.plugin`; the core loads this one alone.
CONTRACT = 1

hookspec = pluggy.HookspecMarker("tunedgemm")
hookimpl = pluggy.HookimplMarker("tunedgemm")


@hookspec
def supports(shape: Shape, device: Device) -> Unsupported | None:
    """Return why the static limits exclude the shape, else None: pure, fast, valid for absent devices."""


@hookspec
def enumerate_solutions(shape: Shape, device: Device) -> Iterable[Solution]:
    """List the solutions for a supported shape, best guesses first, the same in every process."""


@hookspec
def run(solution: Solution, operands: tuple[Any, ...]) -> Any:
    """Launch a solution eagerly and return the output tensor.

    It does not get the shape, so shuffled weights and scales come in separate types
    (`ShuffledWeight`, `ShuffledScale`), which name the order.
    """


@hookspec
def heuristic_fallback(shape: Shape, device: Device) -> Solution | None:
    """Name the solution for an untuned call, or None unless it is expected to beat torch."""


@hookspec
def bind(solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
    """Do all slow work before any graph capture, and return the launcher for exactly this shape.

    The launcher gets plain tensors. A weight whose ``shape.layout`` is not ``row`` comes as its
    bytes are in memory.
    """


@hookspec
def prepare(solution: Solution, shape: Shape, device: Device) -> None:
    """Compile into the artifact cache, in a process without a device, so that `bind` compiles nothing."""


@hookspec
def refine(solution: Solution, shape: Shape, device: Device) -> Iterable[Solution]:
    """List the neighbours of a good solution that are worth timing next."""


@hookspec
def lacks(solution: Solution, shape: Shape, device: Device) -> str:
    """Say why `bind` would refuse a solution; "" where it would not, or where only `bind` can tell."""


@hookspec
def source_of(solution: Solution, shape: Shape, device: Device) -> str:
    """Say where an alias, or a solution without a name, gets its kernel from; "" for all others."""


@hookspec
def library_version(device: Device) -> str:
    """Name the version of the library behind the kernels; a text that changes when they become others."""


@hookspec
def details(device: Device) -> Iterable[str]:
    """List lines for ``tunedgemm plugins -v``: libraries and kernels on this machine, refusals."""
