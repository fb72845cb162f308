"""A plugin that keeps the contract with as few arguments as it can; its distribution is the folder beside this one."""

from collections.abc import Iterator
from typing import Any

from tunedgemm.plugin import Shape, Solution, Unsupported, hookimpl

OPS = ("a16w16",)


@hookimpl
def supports(shape: Shape) -> bool | Unsupported:
    """Plain weights, and outputs of the activations' dtype."""
    if shape.layout != "row" or shape.scale != "none" or shape.outdtype != shape.dtype or shape.bias_dtype not in ("", shape.dtype):
        return Unsupported("takes plain operands of one dtype")
    return True


@hookimpl
def enumerate_solutions() -> Iterator[Solution]:
    """The same two for every shape."""
    yield Solution("fake", "linear")
    yield Solution("fake", "product", split_k=1)


@hookimpl
def run(operands: tuple[Any, ...], solution: Solution) -> Any:
    """Arguments in another order than the specification's."""
    import torch

    if solution.kernel_name == "linear":
        return torch.nn.functional.linear(*operands)
    x, weight, *bias = operands
    out = x.float() @ weight.float().t()
    return (out + bias[0] if bias else out).to(x.dtype)
