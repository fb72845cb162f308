"""How torch.compile's Inductor writes calls of our ops: straight to the function that computes them.

By default Inductor writes ``torch.ops.tunedgemm.<op>.default(…)``, and every call goes through torch's dispatcher and back into Python,
which takes longer than what we do. A graph that Inductor has made needs nothing of the dispatcher: gradients, casts and functional
transforms are behind it. Nothing is loaded for this: Inductor is told when torch loads it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tunedgemm.integrations.dynamo import when_loaded

_LOWERING = "torch._inductor.lowering"

#: Of an op's name, where what computes it is found.
_STRAIGHT = "torch.ops.tunedgemm.{}_straight"


def call_straight(op: Any, name: str, run: Callable[..., torch.Tensor]) -> None:
    """Have the code that Inductor writes from here on call *run* for an op, as ``torch.ops.tunedgemm.<name>_straight``.

    Args:
        op: of ``torch.ops.tunedgemm``, one tensor its output.
        name: of the op.
        run: takes the op's arguments; its output is contiguous. Code that is in Inductor's caches finds it by that name.
    """
    setattr(torch.ops.tunedgemm, _STRAIGHT.format(name).rpartition(".")[2], run)
    when_loaded(_LOWERING, functools.partial(_lower, op))


def _lower(op: Any) -> None:
    """Give the op Inductor's lowering for ops that it does not look into, with another function to call.

    Code in C++ and in FX finds ops in the dispatcher, and keeps to it.
    """
    from torch._inductor.lowering import constrain_to_fake_tensors, lowerings, make_fallback

    make_fallback(op, constrain_to_fake_tensors, warn=False)
    fallback = lowerings[op]

    def lowered(*arguments: Any, **named: Any) -> Any:
        return straight(fallback(*arguments, **named))

    lowered._is_fallback_handler = True  # type: ignore[attr-defined]
    lowerings[op] = lowered


def straight(out: Any) -> Any:
    """Have what Inductor has for an output be computed by a straight call, if it is a call of an op of ours; returns it."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    # What computes an output has several, of which this is one, for Inductor: a buffer in a box in a box.
    output: Any = getattr(getattr(out, "data", None), "data", None)
    kernel = output.inputs[0] if isinstance(output, ir.MultiOutput) else None
    named = f"{getattr(kernel, 'op_overload', '')}"  # tunedgemm.<op>.default
    if isinstance(kernel, ir.FallbackKernel) and named.startswith("tunedgemm.") and not (V.graph.cpp_wrapper or V.graph.fx_wrapper):
        kernel.python_kernel_name = _STRAIGHT.format(named.split(".")[1])
        output.skip_size_stride_alignment_checks = True  # 0.4 us of every call
    return out
