"""A plugin that keeps the contract with the fewest arguments, and has an option.

Its distribution is the neighbouring folder.
"""

import sys
from collections.abc import Iterator
from typing import Any

from tunedgemm.plugin import Backend, Option, Shape, Solution, Unsupported, hookimpl

SPACE = Option("--fake-space", "TUNEDGEMM_FAKE_SPACE", "how much to list", ("small", "full"))


@hookimpl
def supports(shape: Shape) -> Unsupported | None:
    """Accept plain weights and outputs of the activations' dtype."""
    if shape.layout != "row" or shape.scale != "none" or shape.outdtype != shape.dtype or shape.bias_dtype not in ("", shape.dtype):
        return Unsupported("takes plain operands of one dtype")
    return None


@hookimpl
def enumerate_solutions() -> Iterator[Solution]:
    """Yield the same two for every shape, and a third in the full space."""
    yield Solution("fake", "linear")
    yield Solution("fake", "product", split_k=1)
    if SPACE.value() == "full":
        yield Solution("fake", "product", split_k=2)


@hookimpl
def run(operands: tuple[Any, ...], solution: Solution) -> Any:
    """Run a solution; the arguments are in another order than the specification's."""
    import torch

    if solution.kernel_name == "linear":
        return torch.nn.functional.linear(*operands)
    x, weight, *bias = operands
    out = x.float() @ weight.float().t()
    return (out + bias[0] if bias else out).to(x.dtype)


backend = Backend("fake", sys.modules[__name__], ops=("a16w16",), options=(SPACE,))
