"""Outputs that AITER's functions take as arguments, and activations that they apply to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from tunedgemm.integrations import OperandError
from tunedgemm.plugin import UserError


def output_dtype(y: Tensor | None, dtype: Any = None) -> torch.dtype:
    """Return the dtype to compute in: that of the given output, else the given one, else bf16."""
    if y is not None:
        return y.dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.bfloat16


def float_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute an output in that is cut off to integers: float32; else its own."""
    return dtype if dtype.is_floating_point else torch.float32


def written(y: Tensor | None, product: Any) -> Tensor:
    """Copy a product into the given output, and return that; without one return the product.

    Raises:
        OperandError: the output has another shape.
    """
    if y is None:
        return product
    if y.shape != product.shape:
        raise OperandError(f"the output must be {list(product.shape)} (got {list(y.shape)})")
    return y.copy_(product)


def activated(product: Tensor, activation: str | None) -> Tensor:
    """Apply an activation by AITER's name.

    Raises:
        UserError: the name is unknown.
    """
    if activation is None:
        return product
    if activation in ("silu", "silu_exp2"):
        return functional.silu(product)
    if activation in ("gelu", "gelu_tanh"):
        return functional.gelu(product, approximate="tanh" if activation == "gelu_tanh" else "none")
    if activation in ("relu", "relu6"):
        return torch.clamp(product, 0.0, 6.0 if activation == "relu6" else None)
    raise UserError(f"activation: unknown name (got {activation!r}); known: gelu, gelu_tanh, relu, relu6, silu, silu_exp2")
