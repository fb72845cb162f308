"""The hooks of a backend, and the markers of their specifications and implementations.

An implementation may take any subset of a hook's arguments, without defaults. The device is the
one whose limits apply. `Backend` validates the hooks by pluggy and calls them as plain functions,
without hook wrappers. It calls `supports` first, so that later hooks get only supported shapes;
`bind` gets only present devices.

In `supports`, `bind` and `lacks`, a PluginError is a refusal with its text as the reason.
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

#: Version of the hooks, of `Backend` and of `tunedgemm.plugin`; the core loads no other.
CONTRACT = 1

hookspec = pluggy.HookspecMarker("tunedgemm")
hookimpl = pluggy.HookimplMarker("tunedgemm")


@hookspec
def supports(shape: Shape, device: Device) -> Unsupported | None:
    """Return why static limits exclude a shape, else None; pure, fast, also for absent devices."""


@hookspec
def enumerate_solutions(shape: Shape, device: Device) -> Iterable[Solution]:
    """List the solutions for a supported shape, best guesses first, equal in every process."""


@hookspec
def run(solution: Solution, operands: tuple[Any, ...]) -> Any:
    """Launch a solution eagerly and return the output tensor.

    Shuffled weights and scales keep their types (`ShuffledWeight`, `ShuffledScale`), which name the
    order, since `run` does not get the shape.
    """


@hookspec
def heuristic_fallback(shape: Shape, device: Device) -> Solution | None:
    """Return the solution for an untuned call if it is expected to beat torch, else None."""


@hookspec
def invariant_fallback(shape: Shape, device: Device) -> Solution | None:
    """Return the solution for an untuned call in batch-invariant mode, else None.

    All answers for one N, K, dtypes and epilogue have one `Solution.sum_order`, and either every M
    gets an answer or none does: the bits of a row must not depend on M.
    """


@hookspec
def bind(solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
    """Return the launcher for exactly this shape, after all slow work: compiling, loading.

    The launcher gets plain tensors; a shuffled weight (``shape.layout`` other than ``row``) is a
    plain tensor of its bytes.
    """


@hookspec
def prepare(solution: Solution, shape: Shape, device: Device) -> None:
    """Compile into the artifact cache, in a process without a device, so that `bind` need not."""


@hookspec
def refine(solution: Solution, shape: Shape, device: Device) -> Iterable[Solution]:
    """List the neighbours of a fast solution that are worth timing."""


@hookspec
def lacks(solution: Solution, shape: Shape, device: Device) -> str:
    """Return why `bind` would refuse a solution; "" if it would not or only `bind` can know."""


@hookspec
def source_of(solution: Solution, shape: Shape, device: Device) -> str:
    """Return the source of the kernel of an alias or of an unnamed solution; "" for others."""


@hookspec
def library_version(device: Device) -> str:
    """Return the version of the kernels' library, a text that changes whenever they do."""


@hookspec
def details(device: Device) -> Iterable[str]:
    """List lines for ``tunedgemm plugins -v``: libraries, kernels, and why some are unusable."""
