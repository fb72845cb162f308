"""Backend ``triton``: GEMM kernels in Triton, for NVIDIA and AMD. Importing it loads neither Triton nor torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from tunedgemm.plugin import Device, Launcher, Shape, Solution, Unsupported, hookimpl

from tunedgemm_triton import heuristic, launch, limits, plan_launch, searchspace, solutions
from tunedgemm_triton.dialect import OURS
from tunedgemm_triton.planned import PLANNED

CONTRACT = 1
OPS = (*limits.OPS, *PLANNED)
OPTIONS = (searchspace.OPTION,)


def library_version(device: Device) -> str:  # noqa: ARG001
    """Empty: kernel names carry the revision of their source."""
    return ""


@hookimpl
def supports(shape: Shape, device: Device) -> bool | Unsupported:
    """Whether the architecture's static limits allow the shape."""
    return PLANNED.get(shape.op, limits).supports(shape, device)


@hookimpl
def enumerate_solutions(shape: Shape, device: Device) -> Iterable[Solution]:
    """The kernels worth timing for the shape, a JSON file's choice and then the best guesses first; or a search space of the user's own."""
    answer = supports(shape, device)
    own = searchspace.enumerated(OURS, shape, device, answer)
    if own is not None:
        return own
    first = heuristic_fallback(shape, device) if answer else None
    listed = PLANNED.get(shape.op, solutions).enumerate_solutions(shape, device)
    return itertools.chain([first], (found for found in listed if found != first)) if first else listed


@hookimpl
def heuristic_fallback(shape: Shape, device: Device) -> Solution | None:
    """The solution of an untuned call: that of a JSON file, if there is one."""
    return heuristic.heuristic_fallback(shape, device)


@hookimpl
def prepare(solution: Solution, shape: Shape, device: Device) -> None:
    """Compile into the artifact cache, without a device."""
    if shape.op in PLANNED:
        plan_launch.prepare(PLANNED[shape.op], solution, shape, device)
    else:
        launch.prepare(solution, shape, device)


@hookimpl
def bind(solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
    """Load and fix everything that a call of exactly this shape needs."""
    if shape.op in PLANNED:
        return plan_launch.bind(PLANNED[shape.op], solution, shape, device)
    return launch.bind(solution, shape, device)


@hookimpl
def refine(solution: Solution, shape: Shape, device: Device) -> Iterable[Solution]:
    """The solution's neighbours: one parameter changed at a time."""
    return searchspace.inside(PLANNED.get(shape.op, solutions).refine(solution, shape, device), OURS, shape, device)
