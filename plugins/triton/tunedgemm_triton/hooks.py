"""Hooks of the backend ``triton``."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from tunedgemm.plugin import Device, Launcher, Shape, Solution, Unsupported, hookimpl

from tunedgemm_triton import heuristic, installed, invariant, launch
from tunedgemm_triton.families import family_of
from tunedgemm_triton.jsonfiles import space as json_space
from tunedgemm_triton.jsonfiles.dialect import OURS


@hookimpl
def library_version() -> str:
    """Return Triton's version, such as ``triton 3.7.0``; "" where it is not installed.

    Kernel names carry the revision of their source. Another Triton compiles the same source, so
    rows of another version serve.
    """
    return f"triton {installed.version()}" if installed.version() else ""


@hookimpl
def lacks(solution: Solution, shape: Shape, device: Device) -> str:
    """Return why the solution does not serve the shape, or an empty text."""
    return launch.unfit(solution, shape, device)


@hookimpl
def source_of(solution: Solution, shape: Shape, device: Device) -> str:
    """Return the JSON file and the bucket that answer for an alias, or an empty text."""
    return heuristic.source_of(solution, shape, device)


@hookimpl
def supports(shape: Shape, device: Device) -> Unsupported | None:
    """Return why the architecture's static limits exclude the shape, or None."""
    reason = family_of(shape.op).unsupported(shape, device)
    return Unsupported(reason) if reason else None


@hookimpl
def enumerate_solutions(shape: Shape, device: Device) -> Iterable[Solution]:
    """Yield the kernels worth timing: a JSON file's choice, then the best guesses; or the user's
    search space.
    """
    user_space = json_space.enumerate_current(OURS, shape, device)
    if user_space is not None:
        return user_space
    first = heuristic.solution_from_file(OURS, shape, device)
    listed = family_of(shape.op).enumerate_solutions(shape, device)
    return itertools.chain([first], (solution for solution in listed if solution != first)) if first else listed


@hookimpl
def heuristic_fallback(shape: Shape, device: Device) -> Solution | None:
    """Return the solution of an untuned call: the choice of a JSON file, else a best guess or none."""
    return heuristic.heuristic_fallback(shape, device)


@hookimpl
def invariant_fallback(shape: Shape, device: Device) -> Solution | None:
    """Return the solution of an untuned call in batch-invariant mode, or None."""
    return invariant.invariant_fallback(shape, device)


@hookimpl
def prepare(solution: Solution, shape: Shape, device: Device) -> None:
    """Compile into the artifact cache, without a device."""
    launch.prepare(solution, shape, device)


@hookimpl
def bind(solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
    """Load the kernel and fix everything that a call of exactly this shape needs."""
    return launch.bind(solution, shape, device)


@hookimpl
def refine(solution: Solution, shape: Shape, device: Device) -> Iterable[Solution]:
    """Yield the solution's neighbours: one parameter changed at a time."""
    near = family_of(shape.op).refine(solution, shape, device)
    return json_space.filter_current(near, OURS, shape, device)
