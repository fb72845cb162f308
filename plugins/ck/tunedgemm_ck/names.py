"""Names: solutions to instances, and back."""

from __future__ import annotations

from collections.abc import Callable

import attrs
from tunedgemm.plugin import Device, PluginError, Shape, Solution

from tunedgemm_ck.family import Candidate, Family, Instance

#: Between the names of both stages, as in a table of fmoe.
JOIN = "+"


@attrs.frozen(cache_hash=True)
class Stages:
    """The instances of fmoe's two stages.

    Attributes:
        first: up to the quantised intermediate.
        second: from there to the output.
    """

    first: Instance
    second: Instance

    @property
    def name(self) -> str:
        """The text of ``kernelName``: AITER's ``kernelName1`` and ``kernelName2``."""
        return f"{self.first.name}{JOIN}{self.second.name}"


def parse_stages(name: str, libtype: str, parse: Callable[[str], Instance]) -> Stages:
    """The stages of a name, each read by *parse*.

    Raises:
        PluginError: these are not two names, or one of them is unknown.
    """
    names = name.split(JOIN)
    if len(names) != 2 or not all(names):
        raise PluginError(f"{libtype} has no kernel {name!r} for fmoe: two stages are two names with a {JOIN} between them")
    return Stages(*map(parse, names))


def solution_of(family: Family, chosen: Candidate) -> Solution:
    """An instance and its split as a solution."""
    instance, split = chosen
    return Solution(family.libtype, instance.name, split_k=split, deterministic=family.deterministic(instance, split))


def resolve(family: Family, solution: Solution, shape: Shape, device: Device) -> Candidate:
    """The instance of a solution and its split.

    Raises:
        PluginError: no instance has that name, or it cannot serve the shape on the device.
    """
    instance = family.parse(solution.kernel_name, shape.op)
    if reason := family.unfit(instance, solution.split_k, shape, device):
        raise PluginError(f"{family.libtype} {solution.kernel_name}: {reason}")
    return instance, solution.split_k
