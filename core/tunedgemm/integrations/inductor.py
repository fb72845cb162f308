"""Offer our GEMM as a choice in torch.compile's max-autotune, after `offer`.

Without `offer`, a routed GEMM is a custom op that looks up the tables in every call, which is
better if M varies: max-autotune chooses once, for the M at compilation, and keeps that choice.

Inductor caches choices. After tuning again, set ``TORCHINDUCTOR_FORCE_DISABLE_CACHES=1`` once.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tunedgemm.dispatch.tuned_gemm import tgemm
from tunedgemm.errors import UserError
from tunedgemm.integrations import linear as routing
from tunedgemm.integrations.dynamo import watch_loading
from tunedgemm.integrations.graph_ops import graph_op, torch_fallback
from tunedgemm.integrations.lowering import as_direct_call
from tunedgemm.ops import DEFAULT_OP

#: Dtypes that torch multiplies without scales.
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

#: Part of torch.compile's cache key, so that graphs with and without the choice are separate.
_TAG = "+tunedgemm.inductor"

#: Numbers for the names of choices in torch 2.11.
_numbers = itertools.count()

#: Callbacks that withdraw an offer.
_offered = contextlib.ExitStack()


def offer(*, external: bool = False) -> None:
    """Let max-autotune choose between our op, ATen and Triton in graphs compiled from now on.

    It covers routed GEMMs and calls of `gemm_a16w16` without scales and with plain weights.

    Args:
        external: also offer our GEMM for unrouted ones (Inductor's ``external_matmul``), at the
            cost of a copy into the output that Inductor allocates.

    Raises:
        UserError: this torch has no such choices.
    """
    choose = _inductor()
    withdraw()
    watch_loading()  # Inductor is loaded now, so our ops get the lowerings that choices replace
    for op, decomposition in ((routing.op, linear), (graph_op(DEFAULT_OP), a16w16)):
        choose(op, decomposition, f"tunedgemm_{decomposition.__name__}")
    if external:
        torch._inductor.config.external_matmul = [*torch._inductor.config.external_matmul, tunedgemm_mm]
        _offered.callback(_without_external)
    torch.compiler.config.cache_key_tag += _TAG
    _offered.callback(_without_tag)


def withdraw() -> None:
    """Undo `offer`, if it was called; compiled graphs do not change."""
    _offered.close()


def _without_external() -> None:
    others = [function for function in torch._inductor.config.external_matmul if function is not tunedgemm_mm]
    torch._inductor.config.external_matmul = others


def _without_tag() -> None:
    torch.compiler.config.cache_key_tag = torch.compiler.config.cache_key_tag.replace(_TAG, "")


def tunedgemm_mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Compute ``a[M, K] @ b[K, N]`` into *out*, as Inductor's external matmul."""
    out.copy_(tgemm.dispatcher.call(a, b.t(), otype=out.dtype))  # a square b may have any strides


def _inductor() -> Callable[[Any, Callable[..., Any], str], None]:
    """Return this torch's function that makes an op a choice, given its decomposition and a name."""
    try:
        custom_op = importlib.import_module("torch._inductor.kernel.custom_op")
    except ImportError as error:
        raise _too_old() from error
    register = getattr(custom_op, "register_custom_op_autotuning", None)
    parameters = set(inspect.signature(register).parameters if register is not None else ())
    if {"configs", "name", "min_speedup_threshold"} <= parameters:
        return _choose
    if {"configs", "name", "dispatch_on"} <= parameters:
        return _choose_anew
    raise _too_old()


def _choose(op: Any, decomposition: Callable[..., Any], name: str) -> None:
    """Register an op with Inductor, which runs the op where it has no choices: torch 2.13."""
    from torch._inductor.kernel.custom_op import CustomOpConfig, register_custom_op_autotuning
    from torch._inductor.lowering import user_lowerings

    register_custom_op_autotuning(op, configs=[CustomOpConfig(decomposition)], name=name, min_speedup_threshold=1.0)
    user_lowerings[op] = _lower_under_max_autotune(user_lowerings[op], decomposition, lambda *_, **__: None)
    _offered.callback(user_lowerings.pop, op, None)


def _choose_anew(op: Any, decomposition: Callable[..., Any], name: str) -> None:
    """Replace an op's lowering as torch 2.11's registration would, which refuses existing ops.

    Each choice has a new name, because a known name leaves the op out of the choices. A chosen op
    is called with its tensors alone, so a call with other arguments has no choice.
    """
    from torch._inductor.kernel.custom_op import _extract_tensor_inputs, autotune_custom_op
    from torch._inductor.lowering import lowerings

    itself = lowerings[op]

    def choosing(*arguments: Any, **named: Any) -> Any:
        tensors, rest = _extract_tensor_inputs(arguments, named, op)
        schema = {argument.name: argument for argument in op._schema.arguments}
        if any(value != schema[key].default_value for key, value in rest.items()):
            return itself(*arguments, **named)
        return autotune_custom_op(f"{name}_{next(_numbers)}", [decomposition], tensors, [rest], op)

    lowerings[op] = _lower_under_max_autotune(choosing, decomposition, itself)
    _offered.callback(lowerings.__setitem__, op, itself)


def _too_old() -> UserError:
    return UserError(
        f"offer: torch {torch.__version__} cannot choose between an op and others; use torch 2.13 or 2.11, "
        "or leave it out, because routed products run in compiled graphs without it"
    )


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, weight_layout: str = "row") -> torch.Tensor:
    """Decompose the routed op for Inductor, which has choices of ATen and of Triton for it."""
    del weight_layout
    return torch._C._nn.linear(x, weight, bias)


def a16w16(  # noqa: PLR0913, PLR0917 - the op's arguments
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_a: None = None,
    scale_b: None = None,
    scale_c: None = None,
    otype: torch.dtype | None = None,
    weight_layout: str = "row",
    fields: str = "",
    shuffled_scales: Sequence[int] = (),
) -> torch.Tensor:
    """Decompose `gemm_a16w16` without scales for Inductor."""
    del scale_a, scale_b, scale_c, weight_layout, fields, shuffled_scales
    return torch_fallback(x, weight, bias, otype)


def _lower_under_max_autotune(choosing: Any, decomposition: Any, itself: Any) -> Any:
    """Make a lowering that chooses products under max-autotune, and runs the op *itself* otherwise."""
    signature = inspect.signature(decomposition)

    def lowered(*arguments: Any, **named: Any) -> Any:
        settings = torch._inductor.config
        tunes, bound = settings.max_autotune or settings.max_autotune_gemm, signature.bind(*arguments, **named).arguments
        scaled = any(bound.get(name) is not None for name in ("scale_a", "scale_b", "scale_c"))
        product = bound.get("weight_layout", "row") == "row" and not scaled and bound["x"].get_dtype() in _FLOATS
        return as_direct_call(choosing(*arguments, **named)) if tunes and product else itself(*arguments, **named)

    return lowered
