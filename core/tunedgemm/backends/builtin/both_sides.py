"""Routes of a16wn that quantise x to the weight's format and call the op of both sides by its tables.

They change numbers, so they serve only where the option allows it; see `tunedgemm.ops.both_sides`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs

from tunedgemm.backends.builtin import dequantised
from tunedgemm.backends.builtin.route import Family, Route
from tunedgemm.backends.option import Option
from tunedgemm.device import Device
from tunedgemm.dtype import torch_dtype
from tunedgemm.ops.both_sides import PREFIX, PRODUCTS, quantiser
from tunedgemm.ops.weight_formats import format_of
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch

_ALLOWED = "quantised"
OPTION = Option(
    "--torch-activations",
    "TUNEDGEMM_TORCH_ACTIVATIONS",
    "quantised lets a16wn quantise its activations to the format of the weight, which changes numbers",
    ("given", _ALLOWED),
)


def _route(op: str) -> Route:
    def make(shape: Shape, device: Device) -> Callable[..., Any]:
        del device
        quantised, product, otype = quantiser(shape), dequantised.tuned_call(), torch_dtype(shape.outdtype)

        def as_both_sides(*operands: torch.Tensor | None) -> torch.Tensor:
            return product(op, *quantised(*operands), otype=otype)

        return as_both_sides

    def unfit(shape: Shape, device: Device) -> str:
        del device
        if PRODUCTS.get(name := format_of(shape).name) != op:
            return f"takes weights of {' and '.join(each for each, other in PRODUCTS.items() if other == op)}, not {name}"
        if shape.layout != "row":
            return f"takes weights in the checkpoint's layout, not {shape.layout}"
        if shape.bias and op == "a8w8_blockscale":
            return "adds no bias"
        now = OPTION.value()
        return "" if now == _ALLOWED else f"quantises the activations; set {OPTION.variable}={_ALLOWED} to allow it (now {now})"

    return Route(make, unfit, is_nested=True)


family: Family = attrs.evolve(
    dequantised.family,
    routes=MappingProxyType({**dequantised.family.routes, **{f"{PREFIX}{op}": _route(op) for op in dict.fromkeys(PRODUCTS.values())}}),
)
