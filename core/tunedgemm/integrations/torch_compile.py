"""Ops of torch that stand for calls of ours in compiled graphs, which trace them as one node each and look no further.

What is inside runs at every call of the compiled graph: tables, capture, fallback to torch, all as in eager mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: Kept, for an op lives as long as the library that defines it.
_library = torch.library.Library("tunedgemm", "FRAGMENT")


def opaque(schema: str, run: Callable[..., torch.Tensor], fake: Callable[..., torch.Tensor]) -> Any:
    """Define ``torch.ops.tunedgemm.<name>``, without a gradient.

    Args:
        schema: the op's signature, as ``linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor``.
        run: what computes it, on any device.
        fake: takes the same arguments on fake tensors, from which graphs learn the output's sizes and dtype and what is wrong with
            the operands. The op's output is contiguous and new, whatever that of *fake* is.

    Returns:
        The op, to be called in what a graph traces, unless `unseen`.
    """
    name = schema.partition("(")[0]

    def run_contiguous(*arguments: Any, **named: Any) -> torch.Tensor:
        return run(*arguments, **named).contiguous()  # compiled code takes the strides of the fake for granted

    def fake_contiguous(*arguments: Any, **named: Any) -> torch.Tensor:
        out = fake(*arguments, **named)
        return out.new_empty(out.shape)

    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run_contiguous, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tunedgemm::{name}", fake_contiguous, lib=_library)
    return getattr(torch.ops.tunedgemm, name).default


def unseen() -> bool:
    """Whether what is under way sees into no op of ours: a functional transform (vmap, jvp, grad), or an export."""
    return torch._C._functorch.maybe_current_level() is not None or torch.compiler.is_exporting()


# Asked once while a graph is traced, of Python itself: Dynamo of torch 2.11 takes is_exporting for true. It is what
# torch.compiler.assume_constant_result sets, which loads the compiler, too.
unseen._dynamo_marked_constant = True  # type: ignore[attr-defined]
