"""F.linear routing: `linear` is a drop-in for ``torch.nn.functional.linear``, `patched` puts it there."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.compiler import is_compiling

from tunedgemm.dispatch import tgemm
from tunedgemm.errors import UserError
from tunedgemm.integrations.torch_compile import opaque, unseen

_gemm = tgemm.gemm_a16w16
_original = torch.nn.functional.linear


class _Calls(threading.local):
    """Whether this thread is inside a routed call: a launcher that calls F.linear itself means torch's own."""

    inside = False


_calls = _Calls()
_autocast = torch._C._is_any_autocast_enabled


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    """``F.linear`` through the tuned tables; whatever they do not cover runs torch's own, with torch's own errors.

    A shuffled weight runs the solutions for its layout. Torch's own answers for other tensor subclasses, meta and fake
    tensors, integer dtypes, 1-D weights, inputs that need a gradient, calls under autocast and inside functional transforms.
    In a graph of torch.compile it is one op, ``tunedgemm::linear``, which does the same at each call; torch's own is what an
    exported graph has.
    """
    if is_compiling():
        return _traced(input, weight, bias)
    if _calls.inside or _autocast() or input.is_meta:
        return _original(input, weight, bias)
    _calls.inside = True
    try:
        return _gemm(input, weight, bias)
    except (UserError, RuntimeError):  # not this op, or a wrapped tensor without memory: torch answers, or says what is wrong
        return _original(input, weight, bias)
    finally:
        _calls.inside = False


_opaque = opaque("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", run=linear, like=_original)


def _traced(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    """What stands for a call in a graph that is being traced."""
    grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad))
    if grad or _autocast() or unseen():
        return _original(x, weight, bias)
    return _opaque(x, weight, bias)


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """Route every ``torch.nn.functional.linear`` call (so every ``nn.Linear``) through the tables inside the block."""
    before = torch.nn.functional.linear
    torch.nn.functional.linear = linear  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.nn.functional.linear = before
