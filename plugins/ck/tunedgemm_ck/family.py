"""Family: what one template library is to this plugin, whose other files know none of the three."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import attrs
from tunedgemm.plugin import Device, Shape

from tunedgemm_ck.problem import Problem


class Instance(Protocol):
    """Template parameters as a frozen value; hashable, and its name says all of it."""

    @property
    def name(self) -> str:
        """The CSV column ``kernelName``."""


#: An instance and the solution's splitK.
Chosen = tuple[Instance, int]


@attrs.frozen(eq=False)
class Family:
    """One template library. An instance of fmoe is `tunedgemm_ck.stages.Stages`, whose two instances alone are rendered.

    Attributes:
        libtype: name of the backend.
        kind: kind of its devices, ``nvidia`` or ``amd``.
        ops: names of the ops it covers.
        refused: (shape, device) to why no instance can serve the shape there, "" where one can; pure, for absent devices too.
        space: (shape, device, full) to the instances worth timing for a shape that is not refused, best guesses first; *full* asks for
            all, else at most 24 an op and architecture are there in total, of which those that suit the shape are listed.
        parse: (kernelName, op) to its instance; raises PluginError, which says what of the name is unknown.
        unfit: (instance, splitK, shape, device) to why it cannot serve this shape, "" where it can.
        render: (instance, problem) to the source of its shared object, which has `tunedgemm_ck.build.CALL`, or of a stage `MOE_CALL`, and
            includes the library's headers; the same in every process.
        flags: (instance, problem) to options of the compiler beside those of the toolchain.
        near: (instance, splitK, shape, device) to its neighbours, one parameter changed at a time, for `refine`.
        deterministic: (instance, splitK) to the claim.
        revision: raised where a template changes; part of the library version.
    """

    libtype: str
    kind: str
    ops: tuple[str, ...]
    refused: Callable[[Shape, Device], str]
    space: Callable[[Shape, Device, bool], Iterable[Chosen]]
    parse: Callable[[str, str], Instance]
    unfit: Callable[[Instance, int, Shape, Device], str]
    render: Callable[[Instance, Problem], str]
    flags: Callable[[Instance, Problem], tuple[str, ...]]
    near: Callable[[Instance, int, Shape, Device], Iterable[Chosen]]
    deterministic: Callable[[Instance, int], bool]
    revision: int
