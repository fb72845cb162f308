"""Ops of torch that stand for calls of ours in compiled graphs, which trace them as one node each and look no further.

What is inside runs at every call of the compiled graph: tables, capture, fallback to torch, all as in eager mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tunedgemm.integrations.lowering import call_straight

#: Kept, for an op lives as long as the library that defines it.
_library = torch.library.Library("tunedgemm", "FRAGMENT")


def opaque(schema: str, run: Callable[..., torch.Tensor], fake: Callable[..., torch.Tensor]) -> Any:
    """Define ``torch.ops.tunedgemm.<name>``, without a gradient.

    Args:
        schema: the op's signature, as ``linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor``.
        run: what computes it, on any device; its output is new and contiguous, for compiled code takes that for granted.
        fake: takes the same arguments on fake tensors, from which graphs learn the output's sizes and dtype and what is wrong with
            the operands, whatever the strides of its own.

    Returns:
        The op, to be called in what a graph traces, unless `unseen`.
    """
    name = schema.partition("(")[0]

    def fake_contiguous(*arguments: Any, **named: Any) -> torch.Tensor:
        out = fake(*arguments, **named)
        return out.new_empty(out.shape)

    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tunedgemm::{name}", fake_contiguous, lib=_library)
    op = getattr(torch.ops.tunedgemm, name).default
    call_straight(op, name, run)
    return op


def plain(parameter: Any) -> Any:
    """Unwrap a parameter of a subclass, as engines have them to load weights: tables serve none, and graphs need its data alone."""
    of = type(parameter)
    if parameter is None or of is torch.Tensor or of is torch.nn.Parameter or not isinstance(parameter, torch.nn.Parameter):
        return parameter
    with torch._C.DisableTorchFunctionSubclass():  # 0.6 us; vLLM's classes would take 3 us of Python for this, and for each call
        return parameter.data


def unseen() -> bool:
    """Tell whether what is under way sees into no op of ours: a functional transform (vmap, jvp, grad), or an export."""
    return torch._C._functorch.maybe_current_level() is not None or torch.compiler.is_exporting()


# Asked once while a graph is traced, of Python itself: Dynamo of torch 2.11 takes is_exporting for true. It is what
# torch.compiler.assume_constant_result sets, which loads the compiler, too.
unseen._dynamo_marked_constant = True  # type: ignore[attr-defined]
