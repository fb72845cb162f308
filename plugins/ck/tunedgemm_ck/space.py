"""List the solutions of a shape, and the neighbours of one."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from tunedgemm.plugin import Device, Option, PluginError, Shape, Solution, UserError

from tunedgemm_ck.build import Target, is_built
from tunedgemm_ck.family import Family
from tunedgemm_ck.names import resolve, solution_of
from tunedgemm_ck.problem import problem_of
from tunedgemm_ck.stages import split_stages
from tunedgemm_ck.toolchain import Finder

SPACE = Option(
    "--ck-space",
    "TUNEDGEMM_CK_SPACE",
    "list the instances that serve most shapes, or all, which takes hours to compile",
    ("default", "full"),
)


def full_space() -> bool:
    """Return whether the full space is requested.

    Raises:
        UserError: the variable has another value than the option's choices.
    """
    value = SPACE.value().lower()
    if value not in SPACE.choices:
        raise UserError(f"{SPACE.variable} must be {' or '.join(SPACE.choices)} (got {value!r})")
    return value == "full"


def refine(family: Family, solution: Solution, shape: Shape, device: Device) -> Iterable[Solution]:
    """Yield the solution's neighbours.

    Only the full space has them, since each is a compilation of a minute.
    """
    if not full_space():
        return
    for candidate in family.enumerate_neighbours(*resolve(family, solution, shape, device), shape, device):
        yield solution_of(family, candidate)


def enumerate_available(family: Family, finder: Finder, shape: Shape, device: Device) -> Iterable[Solution]:
    """Return the listed solutions whose objects exist or can be compiled.

    Without a toolchain only stored objects can: each of the others would be an error in the tuner.
    """
    problem, listed = problem_of(shape, device.gfx), family.enumerate_instances(shape, device, full_space())
    try:
        finder(problem)
    except PluginError:
        known = functools.cache(lambda *part: is_built(Target(family, *part, finder)))  # stages are listed in several pairs
        listed = (each for each in listed if all(known(*part) for part in split_stages(each[0], problem)))
    return (solution_of(family, candidate) for candidate in listed)
