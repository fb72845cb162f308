"""The contract between the core and a backend: seven hooks, four of them for every backend.

An implementation may take any subset of a hook's arguments and may not give them defaults. Hooks
are validated and collected by pluggy, then bound as plain functions (hook wrappers do not apply).

The registered object also states ``OPS``, the names of the ops it covers. It may state:

* ``SCALE_ORDERS``: the orders of scales that it reads, apart from the usual one of a shape; the
  core asks about no others;
* ``PLATFORMS``: the architectures that it serves, what each needs installed, and where it ran;
* ``ROWS``: rows of other libtypes that it runs as well, each as ``op:libtype``, where the row's own
  backend does not;
* ``OPTIONS``: its settings for a run of the tuner;
* ``VARIABLES``: the environment variables that it reads, apart from those of its options;
* ``library_version(device)``: a text that changes when stored solutions become other kernels;
* ``details(device)``: lines for ``tunedgemm plugins -v``;
* `lacks`: why a kernel cannot serve a shape; a plain function, asked about absent devices, too;
* `source_of`: the file and entry behind its own choice; a plain function, for `explain`.
"""

# Bodies are docstrings only: pluggy reads the signatures.
# mypy: disable-error-code="empty-body"
# ruff: noqa: ARG001
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pluggy

from tunedgemm.backends.launcher import Launcher
from tunedgemm.device import Device
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported

#: Version of the hooks and of `tunedgemm.plugin`; the core loads plugins of this version and of the
#: previous one.
CONTRACT = 1

hookspec = pluggy.HookspecMarker("tunedgemm")
hookimpl = pluggy.HookimplMarker("tunedgemm")


@hookspec
def supports(shape: Shape, device: Device) -> bool | Unsupported:
    """Say whether the static limits allow the shape: pure, fast, and valid for absent devices."""


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


def lacks(solution: Solution, shape: Shape, device: Device) -> str:
    """Say why `bind` would refuse a solution; "" where it would not, or where only `bind` can tell."""
    return ""


def source_of(solution: Solution, shape: Shape, device: Device) -> str:
    """Say where an alias, or a solution without a name, gets its kernel from; "" for all others."""
    return ""
