"""Compose the call of experts of its steps and the library's two products."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs
from tunedgemm.plugin import Shape
from tunedgemm.tools.launching import torch_dtype

from tunedgemm_deepgemm.experts.plan import Plan
from tunedgemm_deepgemm.experts.steps import Steps
from tunedgemm_deepgemm.product import Product

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
    first, second = (
        _Stage(of_product, plan.rows, call, spill, where)
        for of_product, call, spill in zip(plan.products, products, steps.spills or (None, None), strict=True)
    )
    pairs, groups = plan.pairs, plan.groups

    def call(hidden: Any, w1: Any, w2: Any, weight: Any, ids: Any, w1_scale: Any, w2_scale: Any, *_: Any) -> Any:
        places, owners = empty(pairs, dtype=int32, device=where), empty(groups, dtype=int32, device=where)
        steps.place(ids, places, owners)
        x, scales = first.rows()
        steps.quantise(hidden, places, x, scales)
        product = first.multiply(x, scales, w1, w1_scale, owners)
        x, scales = second.rows()
        steps.activate(product, places, weight, x, scales)
        del product  # its memory serves the second product
        product = second.multiply(x, scales, w2, w2_scale, owners)
        out = empty(sizes, dtype=dtype, device=where)
        steps.combine(product, places, weight, out)
        return out

    return call


@attrs.frozen
class _Stage:
    """A product of all rows.

    Attributes:
        product: what the library multiplies.
        count: rows of all, or of each expert in the masked layout.
        call: the library's product.
        spill: the product of rows beyond the library's, if there are such.
        where: torch device of the operands.
    """

    product: Product
    count: int
    call: Callable[..., Any]
    spill: Callable[..., None] | None
    where: torch.device

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate x and its scales; those of rows that are spilled follow, in the same order."""
        import torch

        product, where = self.product, self.where
        if self.spill is None:
            return product.rows(where)
        x = torch.empty(self.count, product.k, dtype=torch_dtype(product.dtype), device=where)
        return x, torch.empty(-(-self.count // product.m), product.blocks[1], product.m, device=where)

    def multiply(self, x: Any, scales: Any, weight: Any, w_scale: Any, owners: Any) -> torch.Tensor:
        """Return the product of all rows."""
        import torch

        product, spill = self.product, self.spill
        if spill is None:
            out = product.output(self.where)
            self.call(x, scales, weight, w_scale, owners, out)
            return out
        out, m = torch.empty(self.count, product.n, dtype=torch.bfloat16, device=self.where), product.m
        self.call(x[:m], scales[0].t(), weight, w_scale, owners[:m], out[:m])
        spill(x, scales, weight, w_scale, owners, out)
        return out
