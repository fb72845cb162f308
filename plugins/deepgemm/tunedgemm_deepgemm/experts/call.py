"""Compose the call of experts of its steps and the library's two products."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tunedgemm.plugin import Shape
from tunedgemm.tools import torch_dtype

from tunedgemm_deepgemm.experts.plan import Plan
from tunedgemm_deepgemm.experts.steps import Steps

if TYPE_CHECKING:
    import torch


def call_of(shape: Shape, plan: Plan, steps: Steps, products: list[Callable[..., Any]], where: torch.device) -> Callable[..., Any]:
    """Return the call of the op's operands; it waits for nothing, so it may be captured.

    Args:
        shape, plan: what is computed.
        steps: the kernels around the products.
        products: functions of x, its scales, the weight, its scales, and the groups of rows.
        where: torch device of the operands.
    """
    import torch

    empty, int32, dtype, sizes = torch.empty, torch.int32, torch_dtype(shape.outdtype), (shape.m, shape.n)
    (first, second), (of_first, of_second), pairs, groups = products, plan.products, plan.pairs, plan.groups

    def call(hidden: Any, w1: Any, w2: Any, weight: Any, ids: Any, w1_scale: Any, w2_scale: Any, *_: Any) -> Any:
        places, owners = empty(pairs, dtype=int32, device=where), empty(groups, dtype=int32, device=where)
        steps.place(ids, places, owners)
        x, scales = of_first.rows(where)
        steps.quantise(hidden, places, x, scales)
        product = first(x, scales, w1, w1_scale, owners)
        x, scales = of_second.rows(where)
        steps.activate(product, places, weight, x, scales)
        del product  # its memory serves the second product
        product = second(x, scales, w2, w2_scale, owners)
        out = empty(sizes, dtype=dtype, device=where)
        steps.combine(product, places, weight, out)
        return out

    return call
