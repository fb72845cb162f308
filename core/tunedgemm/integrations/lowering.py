"""How torch.compile's Inductor writes calls of our ops: straight to the function that computes them.

By default Inductor writes ``torch.ops.tunedgemm.<op>.default(…)``, and every call goes through torch's dispatcher and back into Python,
which takes longer than what we do. A graph that Inductor has made needs nothing of the dispatcher: gradients, casts and functional
transforms are behind it. Nothing is loaded for this: Inductor is told when torch loads it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from tunedgemm.integrations.dynamo import when_loaded

_LOWERING = "torch._inductor.lowering"

#: Ops that Inductor is told of when it is loaded, each with the name in ``torch.ops.tunedgemm`` of what computes it.
_waiting: list[tuple[Any, str]] = []


def call_straight(op: Any, name: str, run: Callable[..., torch.Tensor]) -> None:
    """Have the code that Inductor writes from here on call *run* for an op, as ``torch.ops.tunedgemm.<name>_straight``.

    Args:
        op: of ``torch.ops.tunedgemm``, one tensor its output.
        name: of the op.
        run: takes the op's arguments; its output is contiguous. Code that is in Inductor's caches finds it by that name.
    """
    path = f"{name}_straight"
    setattr(torch.ops.tunedgemm, path, run)
    if _LOWERING in sys.modules:
        _lower(op, path)
    else:
        _waiting.append((op, path))


def _lower(op: Any, path: str) -> None:
    """Give the op Inductor's lowering for ops that it does not look into, with another function to call.

    Code in C++ and in FX finds ops in the dispatcher, and keeps to it.
    """
    from torch._inductor import ir
    from torch._inductor.lowering import constrain_to_fake_tensors, lowerings, make_fallback
    from torch._inductor.virtualized import V

    if op not in lowerings:
        make_fallback(op, constrain_to_fake_tensors, warn=False)
    fallback = lowerings[op]

    def lowered(*arguments: Any, **named: Any) -> Any:
        out = fallback(*arguments, **named)
        # What computes an output has several, of which this is one, for Inductor: a buffer in a box in a box.
        output: Any = getattr(getattr(out, "data", None), "data", None)
        kernel = output.inputs[0] if isinstance(output, ir.MultiOutput) else None
        if isinstance(kernel, ir.FallbackKernel) and not (V.graph.cpp_wrapper or V.graph.fx_wrapper):
            kernel.python_kernel_name = f"torch.ops.tunedgemm.{path}"
            output.skip_size_stride_alignment_checks = True  # 0.4 us of every call
        return out

    lowered._is_fallback_handler = True  # type: ignore[attr-defined]
    lowerings[op] = lowered


@when_loaded(_LOWERING)
def _tell() -> None:
    while _waiting:
        _lower(*_waiting.pop())
