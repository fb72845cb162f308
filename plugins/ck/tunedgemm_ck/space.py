"""Solutions: the instances of a family as solutions of the core, and back."""

from __future__ import annotations

from collections.abc import Iterable

from tunedgemm.plugin import Device, Option, PluginError, Shape, Solution, UserError

from tunedgemm_ck.build import Target, is_built, targets_of
from tunedgemm_ck.family import Family
from tunedgemm_ck.names import resolve, solution_of
from tunedgemm_ck.problem import problem_of
from tunedgemm_ck.toolchain import Finder

SPACE = Option(
    "--ck-space",
    "TUNEDGEMM_CK_SPACE",
    "the instances of a template library that serve most shapes, or all of them, which takes hours to compile",
    ("default", "full"),
)


def full_space() -> bool:
    """Whether all instances are asked for.

    Raises:
        UserError: the variable says something else.
    """
    said = SPACE.value().lower()
    if said not in SPACE.choices:
        raise UserError(f"{SPACE.variable} must be {' or '.join(SPACE.choices)} (got {said!r})")
    return said == "full"


def enumerate_solutions(family: Family, shape: Shape, device: Device) -> Iterable[Solution]:
    """The instances worth timing for the shape, best guesses first."""
    for chosen in family.enumerate_instances(shape, device, full_space()):
        yield solution_of(family, chosen)


def refine(family: Family, solution: Solution, shape: Shape, device: Device) -> Iterable[Solution]:
    """The solution's neighbours; only where all instances are asked for, since each of them is a compilation of a minute."""
    if not full_space():
        return
    for chosen in family.enumerate_neighbours(*resolve(family, solution, shape, device), shape, device):
        yield solution_of(family, chosen)


def enumerate_available(family: Family, finder: Finder, shape: Shape, device: Device) -> Iterable[Solution]:
    """The listed solutions whose objects can be had: without a toolchain each of the others would be an error of the tuner's."""
    problem, listed = problem_of(shape, device.gfx), enumerate_solutions(family, shape, device)
    try:
        finder(problem)
    except PluginError:
        there: dict[object, bool] = {}  # stages are listed in several pairs
        return (
            solution
            for solution in listed
            if _all_built(targets_of(family, family.parse(solution.kernel_name, shape.op), problem, finder), there)
        )
    return listed


def _all_built(targets: Iterable[Target], there: dict[object, bool]) -> bool:
    """Whether all have been built; *there* remembers."""
    for target in targets:
        key = target.instance, target.problem
        if key not in there:
            there[key] = is_built(target)
        if not there[key]:
            return False
    return True
