"""Make Inductor call the implementations of our custom ops directly.

By default Inductor generates ``torch.ops.tunedgemm.<op>.default(…)``, whose way through torch's
dispatcher takes longer than our code. Inductor's graphs need no dispatcher, since gradients, casts
and transforms are already resolved. The lowering is set when torch imports Inductor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tunedgemm.integrations.dynamo import when_loaded

_LOWERING = "torch._inductor.lowering"

#: Where generated code finds the function of an op, by the op's name.
_STRAIGHT = "torch.ops.tunedgemm.{}_straight"


def lower_to_direct_call(op: Any, name: str, run: Callable[..., torch.Tensor]) -> None:
    """Make later generated code call *run* for an op, as ``torch.ops.tunedgemm.<name>_straight``.

    Args:
        op: an op of ``torch.ops.tunedgemm`` with one tensor as output.
        name: the op's name.
        run: takes the op's arguments; its output is contiguous. Code in Inductor's caches finds it
            by that name.
    """
    setattr(torch.ops.tunedgemm, _STRAIGHT.format(name).rpartition(".")[2], run)
    when_loaded(_LOWERING, functools.partial(_lower, op))


def _lower(op: Any) -> None:
    """Give the op Inductor's lowering for opaque ops, with another function to call.

    Code in C++ and in FX finds ops in the dispatcher, and still calls them there.
    """
    from torch._inductor.lowering import constrain_to_fake_tensors, lowerings, make_fallback

    make_fallback(op, constrain_to_fake_tensors, warn=False)
    fallback = lowerings[op]

    def lowered(*arguments: Any, **named: Any) -> Any:
        return as_direct_call(fallback(*arguments, **named))

    lowered._is_fallback_handler = True  # type: ignore[attr-defined]
    lowerings[op] = lowered


def as_direct_call(out: Any) -> Any:
    """Make an Inductor output a direct call if it comes from one of our ops; return the output."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    # In Inductor an output is a buffer in a box in a box: the kernel itself, or before torch 2.14
    # one of several of its kernel.
    output: Any = getattr(getattr(out, "data", None), "data", None)
    kernel = output.inputs[0] if isinstance(output, ir.MultiOutput) else output
    named = f"{getattr(kernel, 'op_overload', '')}"  # tunedgemm.<op>.default
    if isinstance(kernel, ir.FallbackKernel) and named.startswith("tunedgemm.") and not (V.graph.cpp_wrapper or V.graph.fx_wrapper):
        kernel.python_kernel_name = _STRAIGHT.format(named.split(".")[1])
        # The checks of the output's sizes and alignment take 0.4 us of every call.
        output.codegen_size_asserts = output.codegen_alignment_asserts = _write_nothing
    return out


def _write_nothing(wrapper: Any) -> None:
    """Write no code."""
