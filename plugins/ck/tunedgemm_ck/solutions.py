"""Solutions: the instances of a family as solutions of the core, and back."""

from __future__ import annotations

from collections.abc import Iterable

from tunedgemm.plugin import Device, Option, PluginError, Shape, Solution, Unsupported, UserError

from tunedgemm_ck.family import Chosen, Family

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


def supports(family: Family, shape: Shape, device: Device) -> bool | Unsupported:
    """True, or why no instance takes the shape on the architecture."""
    if device.kind != family.kind:
        vendor = {"nvidia": "NVIDIA", "amd": "AMD"}[family.kind]
        return Unsupported(f"{family.libtype} is for {vendor} GPUs, not for {device.gfx}")
    if shape.op not in family.ops:
        return Unsupported(f"op {shape.op} is not covered; covered: {', '.join(family.ops)}")
    if shape.m == 0:
        return Unsupported("an empty batch needs no kernel")
    reason = family.refused(shape, device)
    return Unsupported(reason) if reason else True


def enumerate_solutions(family: Family, shape: Shape, device: Device) -> Iterable[Solution]:
    """The instances worth timing for the shape, best guesses first."""
    for chosen in family.space(shape, device, full_space()):
        yield solution_of(family, chosen)


def refine(family: Family, solution: Solution, shape: Shape, device: Device) -> Iterable[Solution]:
    """The solution's neighbours; only where all instances are asked for, since each of them is a compilation of a minute."""
    if not full_space():
        return
    for chosen in family.near(*resolve(family, solution, shape, device), shape, device):
        yield solution_of(family, chosen)


def solution_of(family: Family, chosen: Chosen) -> Solution:
    """An instance and its split as a solution."""
    instance, split = chosen
    return Solution(family.libtype, instance.name, split_k=split, deterministic=family.deterministic(instance, split))


def resolve(family: Family, solution: Solution, shape: Shape, device: Device) -> Chosen:
    """The instance of a solution and its split.

    Raises:
        PluginError: no instance has that name, or it cannot serve the shape on the device.
    """
    instance = family.parse(solution.kernel_name, shape.op)
    if reason := family.unfit(instance, solution.split_k, shape, device):
        raise PluginError(f"{family.libtype} {solution.kernel_name}: {reason}")
    return instance, solution.split_k
