"""Define torch ops that replace our calls in compiled graphs, as one opaque node each.

The body runs at every call of the compiled graph, as in eager mode: tables, capture, fallback
to torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tunedgemm.integrations.dynamo import watch_loading
from tunedgemm.integrations.lowering import lower_to_direct_call
from tunedgemm.ops.formats.dual_layout import DualLayoutWeight

#: What saves an op's operands, and what computes gradients from them.
Gradient = tuple[Callable[..., None], Callable[..., Any]]
#: torch's own types of tensors.
TORCHS = (torch.Tensor, torch.nn.Parameter)
#: Kept alive: an op lives as long as the library that defines it.
_library = torch.library.Library("tunedgemm", "FRAGMENT")


def define_op(schema: str, run: Callable[..., torch.Tensor], fake: Callable[..., torch.Tensor], gradient: Gradient | None = None) -> Any:
    """Define ``torch.ops.tunedgemm.<name>``.

    Args:
        schema: the op's signature, as ``linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor``.
        run: computes it, on any device. Its output is new and contiguous, which compiled code takes
            for granted.
        fake: takes the same arguments as fake tensors; from it graphs learn the output's sizes and
            dtype, and faults of the operands. The strides of its output do not count.
        gradient: what saves operands, and what computes gradients from them, as in
            `torch.library.register_autograd`; without them the op has no gradient.

    Returns:
        The op, for traced functions to call unless `inside_transform`.
    """
    name = schema.partition("(")[0]

    def fake_contiguous(*arguments: Any, **named: Any) -> torch.Tensor:
        watch_loading()  # a graph is being traced, and Inductor may be loaded for it
        out = fake(*arguments, **named)
        return out.new_empty(out.shape)

    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tunedgemm::{name}", fake_contiguous, lib=_library)
    if gradient is not None:
        torch.library.register_autograd(f"tunedgemm::{name}", gradient[1], setup_context=gradient[0], lib=_library)
    op = getattr(torch.ops.tunedgemm, name).default
    lower_to_direct_call(op, name, run)
    return op


def plain(parameter: Any) -> Any:
    """Unwrap a parameter subclass, which engines use to load weights.

    Tables serve none of them, and graphs need only their data.
    """
    of = type(parameter)
    if parameter is None or of in TORCHS:
        return parameter
    if of is DualLayoutWeight:
        dual: DualLayoutWeight = parameter
        return dual.as_plain()
    if not isinstance(parameter, torch.nn.Parameter):
        return parameter
    with torch._C.DisableTorchFunctionSubclass():  # 0.6 us; vLLM's classes would take 3 us of Python for this, and for each call
        return parameter.data


def inside_transform() -> bool:
    """Check for an active functional transform (vmap, jvp, grad) or export: neither takes opaque ops."""
    return torch._C._functorch.maybe_current_level() is not None or torch.compiler.is_exporting()


# Called once by Python itself while a graph is traced: Dynamo of torch 2.11 takes is_exporting for
# true. torch.compiler's assume_constant_result sets the same attribute, but loads the compiler,
# too.
inside_transform._dynamo_marked_constant = True  # type: ignore[attr-defined]
