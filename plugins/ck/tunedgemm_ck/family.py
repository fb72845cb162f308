"""Describe a template library to the rest of this plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import attrs
from tunedgemm.plugin import Device, Platform, Shape

from tunedgemm_ck.problem import Problem


class Instance(Protocol):
    """Template parameters as a frozen, hashable value; the name determines all of them."""

    @property
    def name(self) -> str:
        """Return the CSV column ``kernelName``."""


#: The op of experts, whose instances are two stages.
MOE = "fmoe"
#: Requirements of Composable Kernel's families.
AMD_NEEDS = ("Composable Kernel's headers, which ROCm has", "amdclang++ or hipcc of ROCm, until compiled")
#: An instance and a solution's splitK.
Candidate = tuple[Instance, int]


def _none(*_: object) -> Iterable[Candidate]:
    """Return no instance: no times of the family's device were measured or fitted."""
    return ()


@attrs.frozen(eq=False)
class Family:
    """One template library.

    An instance of fmoe is `tunedgemm_ck.names.Stages`; only its two instances are rendered.

    Attributes:
        libtype: name of the backend.
        kind: kind of its devices, ``nvidia`` or ``amd``.
        ops: names of the ops it covers.
        unsupported: (shape, device) to why no instance can serve the shape there, or None;
            pure, so it also answers for absent devices.
        enumerate_instances: (shape, device, full) to the instances worth timing, best guesses
            first. *full* lists all. Otherwise an op and architecture have at most 24, of which
            those that suit the shape are listed.
        parse: (kernelName, op) to its instance; raises PluginError that names the unknown part.
        unfit: (instance, splitK, shape, device) to why it cannot serve the shape, or None.
        render: (instance, problem) to the source of its shared object, the same in every process.
            The source contains `tunedgemm_ck.build.CALL` (a stage: `MOE_CALL`) and includes the
            library's headers.
        flags: (instance, problem) to compiler options in addition to the toolchain's.
        enumerate_neighbours: (instance, splitK, shape, device) to its neighbours, one parameter
            changed at a time, for `refine`.
        deterministic: (instance, splitK) to whether the output repeats its bits.
        revision: part of the library version; raised when a template changes.
        platforms: its architectures, and what each needs installed.
        enumerate_untuned: (shape, device) to the instances expected to beat torch, best first.
    """

    libtype: str
    kind: str
    ops: tuple[str, ...]
    unsupported: Callable[[Shape, Device], str | None]
    enumerate_instances: Callable[[Shape, Device, bool], Iterable[Candidate]]
    parse: Callable[[str, str], Instance]
    unfit: Callable[[Instance, int, Shape, Device], str | None]
    render: Callable[[Instance, Problem], str]
    flags: Callable[[Instance, Problem], tuple[str, ...]]
    enumerate_neighbours: Callable[[Instance, int, Shape, Device], Iterable[Candidate]]
    deterministic: Callable[[Instance, int], bool]
    revision: int
    platforms: tuple[Platform, ...] = ()
    enumerate_untuned: Callable[[Shape, Device], Iterable[Candidate]] = _none


def routed(experts: Callable[..., Any], others: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a `Family` that asks one for shapes of fmoe, and another for the others."""

    def chosen(*arguments: Any) -> Any:
        [shape] = (each for each in arguments if isinstance(each, Shape))
        return (experts if shape.op == MOE else others)(*arguments)

    return chosen
