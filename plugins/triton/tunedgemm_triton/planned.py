"""Ops that are launched from plans: what each has of its own, and which op has what."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs
from tunedgemm.plugin import Device, Shape, Solution, Unsupported

from tunedgemm_triton import moe, moe_plan, mx
from tunedgemm_triton.plan import Plan


@attrs.frozen
class Planned:
    """The kernels of an op.

    Attributes:
        supports, enumerate_solutions, refine: as the hooks.
        kernel_of: a name -> the parameters, or PluginError.
        refusal: (parameters, parts of K, shape, device) -> why they cannot serve, or an empty text.
        plan_of: (parameters, parts of K, shape) -> what is launched.
    """

    supports: Callable[[Shape, Device], bool | Unsupported]
    enumerate_solutions: Callable[[Shape, Device], Iterable[Solution]]
    refine: Callable[[Solution, Shape, Device], Iterable[Solution]]
    kernel_of: Callable[[str], Any]
    refusal: Callable[[Any, int, Shape, Device], str]
    plan_of: Callable[[Any, int, Shape], Plan]


_MOE = Planned(moe.supports, moe.enumerate_solutions, moe.refine, moe.kernel_of, moe.refusal, moe_plan.plan_of)
_MX = Planned(mx.supports, mx.enumerate_solutions, mx.refine, mx.kernel_of, mx.refusal, mx.plan_of)

#: Op -> its kernels.
PLANNED = {moe.OP: _MOE, **dict.fromkeys(mx.OPS, _MX)}
